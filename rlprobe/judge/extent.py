"""How much was judged: per stage and captured step, and by reason what was not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from rlprobe.judge.reasons import EXCUSES, METRIC, NO_TRAJECTORY, UNJUDGED

if TYPE_CHECKING:
    from rlprobe.store.read import Run


class Extent(msgspec.Struct, frozen=True):
    """One stage of one step. ``recorded`` is the sum of the other three."""

    recorded: int
    judged: int
    excused: dict[str, int] = {}
    unjudged: dict[str, int] = {}


#: Columns that are looked at, and how many rows at a time.
_COUNTED = [
    *("step", "status", "error", "unjudged_because", "excused_by"),
    *(f"{name}_{side}" for name in ("dtype", "shape") for side in ("benchmark", "target")),
]
_ROWS = 1 << 18

#: Stage -> captured step -> how much.
Extents = dict[str, dict[int, Extent]]


def of(tables: Mapping[str, pl.DataFrame]) -> Extents:
    """Count judged tables.

    A row that is held against a wider floor than its own, and would be beyond that, counts as
    excused and not as judged.

    Args:
        tables: by stage, of :mod:`rlprobe.judge.tables`.
    """
    found: Extents = {}
    for stage, table in tables.items():
        counts: dict[int, Counter[tuple[str | None, str | None]]] = {}
        # a slice before its columns: of a table in pieces, these would be copied whole
        for rows in table.iter_slices(_ROWS):
            part = rows.select(_COUNTED)
            grouped = (
                part.filter(~absent(part)).group_by("step", "unjudged_because", "excused_by").len()
            )
            for step, because, excuse, count in grouped.iter_rows():
                counts.setdefault(step, Counter())[because, excuse] += count
        found[stage] = {step: _extent(counts[step]) for step in sorted(counts)}
    return found


def absent(table: pl.DataFrame) -> pl.Series:
    """Arguments that are not there on either side (None, of which Megatron passes many).

    They were compared, and there is nothing that could be judged.
    """
    nothing = [
        pl.col(f"{name}_{side}").is_null()
        for name in ("dtype", "shape")
        for side in ("benchmark", "target")
    ]
    found = pl.all_horizontal(pl.col("status") == "matched", pl.col("error").is_null(), *nothing)
    return table.select(found.fill_null(False)).to_series()


def _extent(counts: Mapping[tuple[str | None, str | None], int]) -> Extent:
    judged = 0
    excused, unjudged = Counter[str](), Counter[str]()
    for (because, excuse), count in counts.items():
        if because is not None:
            unjudged[because] += count
        elif excuse is not None:
            excused[excuse] += count
        else:
            judged += count
    return Extent(sum(counts.values()), judged, _ordered(excused, EXCUSES),
                  _ordered(unjudged, UNJUDGED))  # fmt: skip


def _ordered(counts: Mapping[str, int], order: Mapping[str, str]) -> dict[str, int]:
    return {reason: counts[reason] for reason in order if reason in counts}


#: What stands in place of a stage for what the trainer reports of a step.
TRAINER = "trainer"


#: Metrics of how long and how much, not of what was computed.
_UNRELATED = re.compile(r"perf|timing|time|throughput|memory|mfu|tokens_per|_len|seqlen", re.I)


def is_computed(metric: str) -> bool:
    """Whether a metric is of what was computed, and not of how long it took."""
    return _UNRELATED.search(metric) is None


def with_metrics(
    extents: Extents,
    *runs: Run,
    judged: Collection[str] = (),
    at_steps: Mapping[int, Collection[str]] | None = None,
) -> Extents:
    """Extents with the trainer's metrics.

    Args:
        extents: of the stages.
        runs: both sides. One that was joined at each step has no trajectory of its own.
        judged: metrics whose curves have a verdict (:mod:`rlprobe.judge.curves`).
        at_steps: by step, metrics that are held against what they are made of
            (:mod:`rlprobe.judge.metrics`).

    Raises:
        StoreError: a run's metrics are damaged.
    """
    names: dict[int, set[str]] = {}
    for run in runs:
        for line in run.metrics():
            found = line.get("metrics")
            if isinstance(found, dict) and isinstance(line.get("step"), int):
                names.setdefault(line["step"], set()).update(filter(is_computed, map(str, found)))
    because = NO_TRAJECTORY if any(run.is_joined for run in runs) else METRIC
    counted = {
        step: _of_metrics(found, {*judged, *(at_steps or {}).get(step, ())}, because)
        for step, found in sorted(names.items())
        if found
    }
    return {**extents, TRAINER: counted} if counted else extents


def _of_metrics(found: set[str], judged: Collection[str], because: str) -> Extent:
    held = len(found.intersection(judged))
    rest = len(found) - held
    return Extent(len(found), held, {}, {because: rest} if rest else {})


def total(extents: Extents) -> Extent:
    """All stages and steps together."""
    every = [extent for steps in extents.values() for extent in steps.values()]
    excused, unjudged = Counter[str](), Counter[str]()
    for extent in every:
        excused.update(extent.excused)
        unjudged.update(extent.unjudged)
    return Extent(
        sum(extent.recorded for extent in every),
        sum(extent.judged for extent in every),
        _ordered(excused, EXCUSES),
        _ordered(unjudged, UNJUDGED),
    )
