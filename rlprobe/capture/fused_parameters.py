"""Parameters of Megatron's fused projections as those of the Hugging Face model's projections.

``linear_qkv`` and, of a gated MLP, ``linear_fc1`` have the rows of several projections; a trainer
that has these apart is compared with each of them. Parameters that are stepped or loaded in place
(:mod:`rlprobe.capture.state`) stay as they are: what is made here is copied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture.megatron_layout import expert_tensor, layout
from rlprobe.capture.megatron_names import is_megatron
from rlprobe.capture.names import unwrap
from rlprobe.capture.parameters import Held
from rlprobe.capture.stacked_experts import StackedExperts
from rlprobe.logical import fused


class FusedParameters:
    """How a model's fused projections are divided; nothing is, outside Megatron.

    Args:
        models: the model's chunks.
        by_expert: weights of stacked experts apart too.
    """

    def __init__(self, models: list[nn.Module], by_expert: bool = False) -> None:
        self._stacks = StackedExperts(models) if by_expert else None
        roots = [unwrap(model)[1] for model in models]
        self._megatron = bool(roots) and all(is_megatron(root) for root in roots)
        config: Any = getattr(roots[0], "config", None) if roots else None
        found = layout(models) if self._megatron else {}
        self._size, self._rank = int(found.get("tp", 1)), int(found.get("tp_rank", 0))
        self._expert_size, _ = expert_tensor() if self._megatron else (1, 0)
        self._gated = bool(getattr(config, "gated_linear_unit", False))
        heads = int(getattr(config, "num_attention_heads", 0) or 0)
        groups = int(getattr(config, "num_query_groups", 0) or heads)
        self._groups = groups
        self._queries = heads // groups if groups and heads % groups == 0 else 0

    def apart(self, item: Held, tensor: Tensor) -> Iterator[tuple[Held, Tensor]]:
        """A parameter's parts, or itself where it is no fused one or its layout is not known.

        Args:
            item: the parameter, or the part or stretch of it that this rank has.
            tensor: laid out as ``item.local``: its values, a gradient, a change.
        """
        stacked = None if self._stacks is None else self._stacks.apart(item, tensor)
        if stacked is not None:
            yield from stacked
            return
        stem, _, leaf = item.name.rpartition(".")
        above, _, module = stem.rpartition(".")
        rows = self._rows(module, item) if self._megatron and leaf in ("weight", "bias") else ()
        inner = math.prod(item.shape[1:])
        parts = [
            self._part(item, tensor, f"{above}.{name}.{leaf}", own, inner)
            for name, own in zip(fused.PARTS.get(module, ()), rows, strict=False)
        ]
        if not parts or None in parts:
            yield item, tensor
            return
        for found in parts:
            if found is not None and found[1].numel():
                yield found

    def _rows(self, module: str, item: Held) -> Sequence[fused.Own]:
        """Of each part, which rows of what this rank holds of the fused parameter are its own."""
        if "experts" in item.name.split(".") and self._expert_size != self._size:
            return ()  # where this rank's part of it lies is told by other groups
        count, rest = divmod(item.shape[0], self._size)
        if module == fused.GATE_UP and self._gated and not rest:
            return fused.halves_of_rank(count, self._size, self._rank)
        each, over = divmod(item.shape[0], self._groups * (self._queries + 2) or 1)
        if module == fused.QKV and self._groups and self._queries and not (rest or over):
            return fused.qkv_of_rank(self._groups, self._queries, each, self._size, self._rank)
        return ()

    def _part(
        self, item: Held, tensor: Tensor, name: str, part: fused.Own, inner: int
    ) -> tuple[Held, Tensor] | None:
        """One part; None where the place of a stretch is not known."""
        shape = (part.whole, *item.shape[1:])
        count = item.shape[0] // self._size
        before = part.first
        if tensor.shape[:1] == (count,) and tensor.shape[1:] == item.shape[1:]:
            slices = [tensor.narrow(0, first, n) for first, n in fused.runs(part.rows)]
            own = torch.cat(slices) if slices else tensor.narrow(0, 0, 0)
            cut = (0, before) if self._size > 1 else None
            held = Held(name, item.parameter, own, shape, cut, None, self._size == 1)
            return held, own
        begin = self._begin(item, count, inner)
        if begin is None or tensor.dim() != 1:
            return None
        # a stretch of what this rank holds, as its distributed optimizer owns it
        places: list[tuple[int, int]] = []
        pieces: list[Tensor] = []
        at = 0
        for first, n in fused.runs(part.rows):
            low = max(first * inner, begin)
            high = min((first + n) * inner, begin + tensor.numel())
            if low < high:
                places.append((before * inner + at + low - first * inner, high - low))
                pieces.append(tensor.narrow(0, low - begin, high - low))
            at += n * inner
        own = torch.cat(pieces) if pieces else tensor.new_zeros(0)
        held = dataclasses.replace(
            item, name=name, local=own, shape=shape, cut=None, start=None, complete=False,
            pieces=(), stretches=tuple(places),
        )  # fmt: skip
        return held, own

    def _begin(self, item: Held, count: int, inner: int) -> int | None:
        """Which element of what this rank holds a stretch begins with; None where it is none.

        Args:
            item: the stretch.
            count: rows that this rank holds.
            inner: elements of a row.
        """
        if item.start is not None:
            return item.start - self._rank * count * inner
        if not item.stretches:
            return None
        # a rank has rows of two halves of the whole: of the gate and of the up projection
        first, half, own = item.stretches[0][0], item.shape[0] // 2 * inner, count // 2 * inner
        if first < half:
            return first - self._rank * own
        return first - half - self._rank * own + own
