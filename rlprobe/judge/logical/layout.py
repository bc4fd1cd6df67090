"""How two sides are laid out otherwise, and whether their records can be joined all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from rlprobe.judge import replicas
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, say

#: Places of a layout's pipeline and chunks (:func:`_layout`).
_PIPELINE, _CHUNKS = 2, 5


def unlike(results: Results, stage: str) -> Said | None:
    """How models are laid out otherwise; None where they are not, or nothing says it."""
    both = _layouts(results, stage)
    if both is None or both[0] == both[1]:
        return None
    left, right = both
    return say(
        "models are divided otherwise ({benchmark} against {target})",
        benchmark=_described(left),
        target=_described(right),
    )


def divides_layers(results: Results, stage: str) -> bool:
    """Whether the sides share layers out to other pipeline ranks, or into other chunks."""
    both = _layouts(results, stage)
    # Megatron's undivided model is one chunk
    return both is not None and any(both[0][at] != both[1][at] for at in (_PIPELINE, _CHUNKS))


def of_one_back_end(results: Results, stage: str) -> bool:
    """Whether one back end runs a stage's model on both sides, so that its modules are the same;
    False where nothing says it."""
    both = _layouts(results, stage)
    return both is not None and both[0][0] == both[1][0]


def _layouts(results: Results, stage: str) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
    """Of the two sides; None where one does not say it."""
    found = []
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        own = [] if run is None else replicas.processes(run, stage)
        if not own:
            return None
        found.append(_layout(own[0]))
    return found[0], found[1]


def _layout(process: Any) -> tuple[Any, ...]:
    megatron = "megatron" in (process.backend or "").lower() or process.chunks is not None
    return (
        "Megatron" if megatron else "undivided",
        process.tp, process.pp, process.cp, process.ep, process.chunks or 1,
    )  # fmt: skip


def _described(layout: Sequence[Any]) -> str:
    names = ("TP", "PP", "CP", "EP")
    sizes = [f"{name} {size}" for name, size in zip(names, layout[1:5], strict=True) if size > 1]
    kind = "FSDP or one process" if layout[0] == "undivided" else str(layout[0])
    return " ".join([kind, *sizes])


def available(results: Results, stage: str, step: int) -> bool:
    """Whether both sides have records by coordinates of a stage and step."""
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        table = None if run is None else run.logical(stage)
        if table is None or table.filter(pl.col("step") == step).is_empty():
            return False
    return True
