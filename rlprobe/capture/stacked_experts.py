"""Weights of all experts in one parameter, as those of each expert.

transformers keeps a layer's experts in two parameters, ``experts.gate_up_proj`` and
``experts.down_proj``, an expert behind another; checkpoints, and Megatron, have each expert's apart
(``experts.3.gate_proj.weight``). Where a side that stacks them is compared with one that does not,
they are recorded apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlprobe.capture.names import parameter_name, unwrap
from rlprobe.capture.parameters import Held
from rlprobe.logical import fused

_DOWN = "down_proj"


class StackedExperts:
    """Which parameters of a model are stacked experts.

    Args:
        models: the model's chunks.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        self._names: set[str] = set()
        for index, model in enumerate(models):
            prefix, _ = unwrap(model)
            chunk = f"{index}." if len(models) > 1 else ""
            for path, module in model.named_modules():
                if _is_stack(module):
                    stem = chunk + parameter_name(path, prefix)
                    self._names |= {f"{stem}.{fused.GATE_UP}", f"{stem}.{_DOWN}"}

    def apart(self, item: Held, tensor: Tensor) -> Iterator[tuple[Held, Tensor]] | None:
        """What this rank holds of each expert; None where the parameter is no stack.

        Args:
            item: the parameter, or the part or stretch of it that this rank has.
            tensor: laid out as ``item.local``: its values, a gradient, a change.
        """
        if item.name not in self._names or len(item.shape) != 3:
            return None
        rows = tuple(item.shape[1:])
        if tensor.shape[1:] == rows and (item.complete or (item.cut or (1,))[0] == 0):
            return self._slices(item, tensor, 0 if item.cut is None else item.cut[1])
        if item.start is not None and tensor.dim() == 1:
            return self._stretches(item, tensor, item.start)
        return None

    def _slices(self, item: Held, tensor: Tensor, first: int) -> Iterator[tuple[Held, Tensor]]:
        """Of whole experts, from a first one on."""
        for number, expert in enumerate(tensor, start=first):
            at = 0
            for name, count in _parts(item, number):
                own = expert.narrow(0, at, count)
                at += count
                yield Held(name, item.parameter, own, (count, *item.shape[2:])), own

    def _stretches(self, item: Held, tensor: Tensor, start: int) -> Iterator[tuple[Held, Tensor]]:
        """Of a stretch of the flattened parameter."""
        at = 0
        for number in range(item.shape[0]):
            for name, count in _parts(item, number):
                size = count * math.prod(item.shape[2:])
                low, high = max(at, start), min(at + size, start + tensor.numel())
                if low < high:
                    own = tensor.narrow(0, low - start, high - low)
                    held = dataclasses.replace(
                        item, name=name, local=own, shape=(count, *item.shape[2:]),
                        start=low - at, complete=high - low == size, cut=None,
                    )  # fmt: skip
                    yield held, own
                at += size


def _parts(item: Held, number: int) -> list[tuple[str, int]]:
    """Names of an expert's weights that a parameter has, and the rows of each."""
    stem, _, leaf = item.name.rpartition(".")
    rows = item.shape[1]
    if leaf == _DOWN:
        return [(f"{stem}.{number}.{_DOWN}.weight", rows)]
    return [(f"{stem}.{number}.{part}.weight", rows // 2) for part in fused.PARTS[leaf]]


def _is_stack(module: Any) -> bool:
    """Whether a module has experts' weights as [experts, out, in], the gate before the up part."""
    own = module._parameters
    both = [own.get(fused.GATE_UP), own.get(_DOWN)]
    laid_out = not getattr(module, "is_transposed", False)
    laid_out &= bool(getattr(module, "is_concatenated", True))
    laid_out &= bool(getattr(module, "has_gate", True))
    return laid_out and all(parameter is not None and parameter.dim() == 3 for parameter in both)
