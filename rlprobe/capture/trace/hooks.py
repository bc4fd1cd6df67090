"""Hooks that a suspect's code sets on gradients: they run before the node that they belong to.

Autograd runs a tensor's hooks ahead of its node's own, so that switching the trace on for a node
comes too late for them. They are seen where they are set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Hooks(TorchFunctionMode):
    """While it is entered, hooks that are set on tensors are run with ``begins`` and ``ends``.

    Args:
        wanted: whether what runs now is the suspect's own code.
        begins, ends: called around such a hook.
    """

    def __init__(
        self, wanted: Callable[[], bool], begins: Callable[[], None], ends: Callable[[], None]
    ) -> None:
        super().__init__()
        self._wanted, self._begins, self._ends = wanted, begins, ends
        #: Whether nothing is traced any more: a hook may outlive its stage.
        self.over = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.register_hook and self._wanted():
            given = dict(zip(("self", "hook"), args, strict=False)) | kwargs
            return func(given["self"], self._around(given["hook"]))
        return func(*args, **kwargs)

    def _around(self, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Any]:
        def traced(gradient: Tensor) -> Tensor | None:
            if self.over:
                return hook(gradient)
            self._begins()
            try:
                return hook(gradient)
            finally:
                self._ends()

        return traced
