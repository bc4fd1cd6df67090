"""What a module computes with of its own: parameters as a call sees them, and their gradients.

FSDP2 puts another tensor in a module's parameters for the time of its forward, and the gradient
arrives at that one. FSDP1 takes them out of the modules and leaves views of its flat parameter
under their names (among the parameters too, where it was asked to keep the original ones). A view
is made anew whenever its unit is gathered and is no leaf of the graph: its gradient is seen by a
hook on the view itself, which adds no node.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from rlprobe.capture.light.statistics import Statistics


class Records(Protocol):
    """Where records go, as a :class:`rlprobe.capture.light.hooks.Tape` has it."""

    statistics: Statistics
    data: dict[str, Any]
    active: bool
    handles: list[Any]
    hooked_parameters: set[tuple[str, str, int]]

    @property
    def quiet(self) -> AbstractContextManager[None]: ...

    def count(self, key: str) -> int: ...


class OwnParameters:
    """The parameters of one module.

    Args:
        tape: where records go.
        prefix: ``Module.{path}.{class}``.
        views: names of those that FSDP1 keeps; None where it keeps none of the module's.
    """

    def __init__(self, tape: Records, prefix: str, views: tuple[str, ...] | None) -> None:
        self._tape = tape
        self._prefix = prefix
        self._views = views
        #: Of each name, the view that was hooked last.
        self._hooked: dict[str, TensorWeakRef] = {}

    def leaves(self, module: nn.Module) -> dict[str, Any]:
        """Leaves of the parameters as they are now, whose gradients are watched from here on."""
        leaves: dict[str, Any] = {}
        # An optimizer may step between two micro-batches, and FSDP2 gathers the new values into
        # the same tensor without a trace: only where nothing trains are they remembered.
        lasting = None if torch.is_grad_enabled() else True
        for key, parameter in self._held(module):
            if parameter is None:
                continue
            leaves[key] = self._tape.statistics.leaf(parameter, lasting=lasting)
            if parameter.requires_grad:
                self._watch(key, parameter)
        return leaves

    def _held(self, module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
        if self._views is None:
            return module._parameters.items()
        # without the flat parameter, which is part of no model
        own = {k: p for k, p in module._parameters.items() if not hasattr(p, "_fqns")}
        gathered = {name: module.__dict__.get(name) for name in self._views if name not in own}
        found: dict[str, Tensor | None] = gathered | own
        return [(name, found.pop(name)) for name in self._views] + list(found.items())

    def _watch(self, key: str, parameter: Tensor) -> None:
        # Here rather than when the hooks are set: what a forward computes with is there now.
        tape = self._tape
        if not parameter.is_leaf:
            if self._views is not None:
                self._watch_view(key, parameter)
            return
        mark = (self._prefix, key, id(parameter))
        if mark in tape.hooked_parameters:
            return
        tape.hooked_parameters.add(mark)

        def hook(owner: Tensor) -> None:
            gradient = owner.grad if owner.grad is not None else getattr(owner, "main_grad", None)
            if gradient is not None:
                self._arrived(key, gradient)

        tape.handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _watch_view(self, key: str, view: Tensor) -> None:
        latest = self._hooked.get(key)
        if latest is not None and latest() is view:  # a module that is called twice
            return
        self._hooked[key] = TensorWeakRef(view)

        def hook(gradient: Tensor) -> None:
            self._arrived(key, gradient)

        self._tape.handles.append(view.register_hook(hook))

    def _arrived(self, key: str, gradient: Tensor) -> None:
        tape = self._tape
        if not tape.active:
            return
        with tape.quiet:
            index = tape.count(f"{self._prefix}.{key}.grad")
            entry = tape.data.setdefault(f"{self._prefix}.parameters_grad.{index}", {})
            entry[key] = [tape.statistics.leaf(gradient, lasting=None)]
