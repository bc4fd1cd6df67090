"""The order of records that stand for a whole stage."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from rlprobe.judge.logical.whole import Key, Whole

if TYPE_CHECKING:
    from rlprobe.store.read import Run


def order_of(
    runs: Sequence[Run], stage: str, step: int, sides: Sequence[Mapping[Key, Whole]]
) -> dict[tuple[str, str], int]:
    """The order in which modules' calls are complete, forward and then backward.

    That of a side whose every rank has them all; where ranks have different layers, these follow
    each other by number, and a rank's own order counts within them.
    """
    orders = [_calls(run, stage, step) for run in runs]
    known, apart = min(orders, key=lambda found: (found[1], -len(found[0])))
    last = len(known) + 1

    def position(call: tuple[str, str]) -> tuple[Any, ...]:
        module, direction = call
        backward = direction == "backward"
        rank, sequence = known.get(call, (last, last))
        place = _place(module) if apart else 0.0
        return backward, -place if backward else place, rank, sequence, module

    wanted = dict.fromkeys(key[:2] for side in sides for key in side)
    return {call: at for at, call in enumerate(sorted(wanted, key=position))}


def _calls(run: Run, stage: str, step: int) -> tuple[dict[tuple[str, str], tuple[int, int]], bool]:
    """By module and direction its first rank and place there; and whether ranks' modules differ."""
    table = run.logical(stage)
    assert table is not None
    here = table.filter(pl.col("step") == step).sort("rank", maintain_order=True)
    found: dict[tuple[str, str], tuple[int, int]] = {}
    ranks: dict[int, set[str]] = {}
    columns = ("rank", "module", "direction", "sequence")
    for rank, module, direction, sequence in here.select(columns).iter_rows():
        found.setdefault((module, direction), (rank, sequence))
        ranks.setdefault(rank, set()).add(module)
    return found, len({frozenset(held) for held in ranks.values()}) > 1


_LAYER = re.compile(r"\.layers\.(\d+)(\.|$)")


_BEFORE = re.compile(r"\b(embed_tokens|embedding|rotary_emb)$")


def _place(module: str) -> float:
    """Before the layers, the layer's number, or behind them."""
    layer = _LAYER.search(module)
    if layer is not None:
        return float(layer[1])
    return -1.0 if _BEFORE.search(module) else math.inf
