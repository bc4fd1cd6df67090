"""How two sides are laid out otherwise, and whether their records can be joined all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from rlprobe.judge import replicas
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import Said, say


def unlike(results: Results, stage: str) -> Said | None:
    """How models are laid out otherwise; None where they are not, or nothing says it."""
    found = []
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        own = [] if run is None else replicas.processes(run, stage)
        if not own:
            return None
        found.append(own[0])
    left, right = (_layout(one) for one in found)
    if left == right:
        return None
    return say(
        "models are divided otherwise ({benchmark} against {target})",
        benchmark=_described(left),
        target=_described(right),
    )


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
