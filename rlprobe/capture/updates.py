"""What an update does that no module shows: gradients per parameter, changes, the loss.

They go to debug.json: ``{parameter}.grad.{n}.debug``, ``.grad_reduced.``, ``.grad_clipped.``,
``.change.`` (new minus old) and ``loss.{part}.{n}.debug``. Where an optimizer steps fp32 copies of
half-precision weights, changes are read off the copies: most of an update is smaller than what such
a weight can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe import sketch as sketch_definition
from rlprobe.capture import megatron_grads
from rlprobe.capture.fused_parameters import FusedParameters
from rlprobe.capture.light.statistics import Statistics, has_values
from rlprobe.capture.parameters import Held, held
from rlprobe.errors import UsageError

#: Kinds of gradient: as accumulated, after the reduction over ranks, after clipping.
GRADIENT_KINDS = ("grad", "grad_reduced", "grad_clipped")

#: Key data of gradient norms is called by the role and this.
NORMS = "_grad_norm"

Names = Callable[[str], str]
Wanted = Callable[[str], bool]


class UpdateRecords:
    """Records of one entry of an update stage, on their way to debug.json.

    Args:
        name: gives the next full name for ``{parameter}.grad`` and the like.
        with_sketch: add sketches.
        wanted: whether a parameter's module is captured.
        by_expert: weights of stacked experts apart.
    """

    def __init__(
        self, name: Names, with_sketch: bool, wanted: Wanted, by_expert: bool = False
    ) -> None:
        self._by_expert = by_expert
        self._name = name
        self._with_sketch = with_sketch
        self._wanted = wanted
        # Sketches are made here, where a shard's place in the whole is known.
        self._statistics = Statistics(False)
        self._sketches: list[tuple[dict[str, Any], Tensor]] = []
        self.data: dict[str, Any] = {}
        #: Which part of its parameter each gradient is of, where an optimizer has another part of
        #: it than the model, and the format of the copies that changes were read off: a line of
        #: ``parts/gradients`` each.
        self.places: dict[str, dict[str, Any]] = {}

    def gradients(self, models: list[nn.Module], kind: str, optimizer: Any = None) -> None:
        """Statistics of every parameter's gradient as it is now; none where there is none.

        Args:
            models: the model's chunks.
            kind: one of GRADIENT_KINDS.
            optimizer: where it is one of Megatron's, the gradients are those that it is about to
                step with; of all others, and of None, each parameter's ``.grad``.

        Raises:
            UsageError: ``kind`` is not one of GRADIENT_KINDS.
        """
        if kind not in GRADIENT_KINDS:
            raise UsageError(f"gradients({kind!r}): accepted are {', '.join(GRADIENT_KINDS)}")
        if megatron_grads.is_megatron(optimizer):
            found = megatron_grads.gradients(models, optimizer)
        else:
            found = ((item, _gradient(item)) for item in held(models))
        projections = FusedParameters(models, self._by_expert)
        for whole, gradient in found:
            if gradient is None:
                continue
            for item, part in projections.apart(whole, gradient):
                if self._wants(item):
                    self._add(f"{item.name}.{kind}", item, part)
                    if optimizer is not None:
                        self.places[item.name] = _place(item, part)

    def changes(
        self, models: list[nn.Module], before: dict[str, Tensor], optimizer: Any = None
    ) -> None:
        """Statistics of every parameter's new value minus ``before``.

        Args:
            models: the model's chunks.
            before: :func:`snapshot` of the same models and optimizer.
            optimizer: what stepped them.
        """
        for item, local in _apart(models, self._wanted, self._by_expert, optimizer):
            old = before.get(item.name)
            if old is None or old.shape != local.shape:
                continue
            wide = _wide(local)
            new = local.to(wide)
            self._add(f"{item.name}.change", item, new - old.to(device=new.device, dtype=wide))
            if local.dtype != item.parameter.dtype:
                self.places[item.name] = {**_place(item, local), "kept": str(local.dtype)}

    def loss(self, part: str, value: Any) -> None:
        """A loss or a part of it: a scalar tensor or a number."""
        if isinstance(value, Tensor):
            leaf = self._statistics.leaf(value)
        else:
            leaf = {"type": type(value).__name__, "value": value}
        self.data[self._name(f"loss.{part}")] = leaf

    def resolve(self) -> int:
        """Fill in all numbers; returns how many records there are."""
        self._statistics.forget()
        self._statistics.resolve()
        for leaf, sketch in self._sketches:
            values = sketch.cpu()
            if bool(torch.isfinite(values).all()):
                leaf["Sketch"] = sketch_definition.encode(values.numpy())
        self._sketches.clear()
        return len(self.data)

    def _wants(self, item: Held) -> bool:
        return self._wanted(item.name.rpartition(".")[0])

    def _add(self, what: str, item: Held, tensor: Tensor) -> None:
        leaf = self._statistics.leaf(tensor, lasting=None)
        leaf["requires_grad"] = item.parameter.requires_grad
        if not item.complete:
            leaf["GlobalShape"] = list(item.shape)
            leaf["Offset"] = item.offsets()
        if self._with_sketch:
            sketch = item.sketch_of(tensor)
            if sketch is not None:
                self._sketches.append((leaf, sketch))
        self.data[self._name(what)] = leaf


def group_norms(optimizer: Any, models: Iterable[nn.Module] = ()) -> Tensor:
    """L2 norm of the gradients of each of an optimizer's parameter groups.

    Args:
        optimizer: anything with torch's ``param_groups``; Megatron's between preparing gradients
            and the step (see :func:`.megatron_grads.group_norms`).
        models: the model's chunks; they tell which of Megatron's weights are divided.

    Returns:
        fp64 tensor of shape (groups,) on the CPU, 0 for a group without gradients. Of sharded
        parameters it is this rank's part: the whole is the root of the sum of the ranks' squares.
        (No collective is called: other ranks may not be capturing.)
    """
    if megatron_grads.is_megatron(optimizer):
        return megatron_grads.group_norms(optimizer, models)
    norms: list[Tensor] = []
    for group in optimizer.param_groups:
        squares: list[Tensor] = []
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            local = getattr(gradient, "_local_tensor", gradient).detach()
            if has_values(local):
                squares.append(torch.linalg.vector_norm(local, dtype=_wide(local)).square())
        # one transfer a group, however many parameters it has
        total = torch.stack(squares).cpu().double().sum() if squares else torch.zeros(())
        norms.append(total.double().sqrt())
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def _place(item: Held, gradient: Tensor) -> dict[str, Any]:
    return {
        "name": item.name,
        "shape": list(item.shape),
        "local_shape": list(gradient.shape),
        "offset": item.offsets(),
        "complete": item.complete,
    }


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _gradient(item: Held) -> Tensor | None:
    """The gradient laid out as ``item.local``; None where there is none or it does not fit."""
    gradient = item.parameter.grad
    if gradient is None:
        gradient = getattr(item.parameter, "main_grad", None)
    return None if gradient is None else item.part_of(gradient)


def snapshot(
    models: list[nn.Module], wanted: Wanted, by_expert: bool = False, optimizer: Any = None
) -> dict[str, Tensor]:
    """Copies of all parameters on this rank, in host memory, by name.

    Args:
        models: the model's chunks.
        wanted: whether a module's parameters are captured.
        by_expert: weights of stacked experts apart.
        optimizer: about to step them; of one that keeps fp32 copies (Megatron's, in half precision)
            these are taken.
    """
    return {
        item.name: local.to("cpu", copy=True)
        for item, local in _apart(models, wanted, by_expert, optimizer)
        if has_values(local)
    }


def _apart(
    models: list[nn.Module], wanted: Wanted, by_expert: bool, optimizer: Any
) -> Iterator[tuple[Held, Tensor]]:
    """Every parameter that is captured, with its values; those of fused projections apart."""
    projections = FusedParameters(models, by_expert)
    if megatron_grads.is_megatron(optimizer):
        values = megatron_grads.copied(models, optimizer)
    else:
        values = ((item, item.local) for item in held(models))
    for whole, every in values:
        for item, local in projections.apart(whole, every):
            if wanted(item.name.rpartition(".")[0]):
                yield item, local
