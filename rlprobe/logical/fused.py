"""Projections that one framework computes as one and another apart.

``qkv_proj`` is Megatron's ``linear_qkv`` and the engines' projection of that name; ``gate_up_proj``
Megatron's ``linear_fc1`` of a gated MLP. Two ways to lay the parts out are known:

- Megatron's ``linear_qkv`` has the rows of one group of heads after those of another: of each
  group the queries, the key, the value (:func:`by_group`); a tensor-parallel rank has an equal
  stretch of these rows, which is some groups or, of fewer groups than ranks, part of one;
- gate and up lie one behind the other, on each tensor-parallel rank its half of either
  (:func:`halves`); so do query, key and value in vLLM and SGLang.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

QKV, GATE_UP = "qkv_proj", "gate_up_proj"
#: The parts of a fused projection, in order.
PARTS: dict[str, tuple[str, ...]] = {
    QKV: ("q_proj", "k_proj", "v_proj"),
    GATE_UP: ("gate_proj", "up_proj"),
}
#: Classes in which the parts lie one behind the other, by the name of the projection.
ONE_BEHIND_THE_OTHER = {QKV: "^QKVParallelLinear", GATE_UP: "."}
#: The norm that Transformer Engine fuses into a projection.
NORMS = {QKV: "input_layernorm", GATE_UP: "post_attention_layernorm"}


@dataclass(frozen=True)
class Own:
    """What a tensor-parallel rank has of one part of a fused projection."""

    #: Which rows of the rank's tensor, in the part's own order.
    rows: Sequence[int]
    #: The part's row that the first of them is, and how many rows the part has over all ranks.
    first: int
    whole: int


def qkv_of_rank(groups: int, queries: int, each: int, size: int, rank: int) -> tuple[Own, ...]:
    """What a rank has of queries, keys and values in Megatron's fused projection.

    Args:
        groups: groups of heads over all ranks.
        queries: query heads of a group.
        each: rows of a head.
        size, rank: of tensor parallelism; the rows divide by ``size``.
    """
    count = groups * (queries + 2) * each // size
    begin = rank * count
    found = []
    for rows in by_group(groups, queries, each):
        low, high = bisect_left(rows, begin), bisect_left(rows, begin + count)
        found.append(Own([row - begin for row in rows[low:high]], low, len(rows)))
    return tuple(found)


def halves_of_rank(width: int, size: int, rank: int) -> tuple[Own, ...]:
    """What a rank has of gate and up projection, of ``width`` rows both together."""
    return tuple(Own(rows, rank * len(rows), size * len(rows)) for rows in halves(width))


def by_group(groups: int, queries: int, each: int) -> tuple[list[int], list[int], list[int]]:
    """Which rows of Megatron's fused projection are those of queries, of keys and of values.

    Args:
        groups: groups of heads in the tensor, each with one key and one value.
        queries: query heads of a group.
        each: rows of a head.

    Returns:
        Rows of each part in the part's own order (its heads one behind the other).
    """
    size = (queries + 2) * each
    q: list[int] = []
    k: list[int] = []
    v: list[int] = []
    for group in range(groups):
        start = group * size
        q += range(start, start + queries * each)
        k += range(start + queries * each, start + (queries + 1) * each)
        v += range(start + (queries + 1) * each, start + size)
    return q, k, v


def halves(width: int) -> tuple[list[int], list[int]]:
    """Which rows are those of the gate and of the up projection."""
    half = width // 2
    return list(range(half)), list(range(half, width))


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive rows as ``(first, how many)``, in order."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and row == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return found
