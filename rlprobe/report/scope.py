"""How far judging reached: what was not judged and why, and the worst of each step and rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl
from markupsafe import Markup

from rlprobe.judge.extent import Extents
from rlprobe.report import words
from rlprobe.report.heat import shade
from rlprobe.report.narrowed import Narrowed


@dataclass(frozen=True)
class Reason:
    """Records of one stage and step that were excused or not judged, for one reason."""

    stage: str
    step: int
    #: ``excused`` or ``unjudged``.
    result: str
    reason: str
    meaning: Markup
    count: int


@dataclass(frozen=True)
class Cell:
    """The largest ratio of error to floor at one step; None where nothing was judged."""

    step: int
    ratio: float | None
    shade: int


@dataclass(frozen=True)
class Row:
    """One stage on one rank; None for what belongs to no rank."""

    stage: str
    rank: int | None
    #: Of a stage with several updates of weights, which; None elsewhere.
    update: int | None
    cells: list[Cell]


@dataclass(frozen=True)
class Grid:
    """Stages, updates and ranks by steps."""

    steps: list[int]
    rows: list[Row]
    #: Whether a stage has several updates of weights.
    updates: bool
    #: Word for rows that belong to no rank.
    without_rank: str


def unjudged(extents: Extents) -> list[Reason]:
    """Everything that was recorded and is not held against a floor of its own."""
    return [
        Reason(stage, step, result, reason, words.reason(reason), count)
        for stage, steps in extents.items()
        for step, extent in steps.items()
        for result, counts in (("excused", extent.excused), ("unjudged", extent.unjudged))
        for reason, count in counts.items()
    ]


#: More ranks than this are shown as one row a stage.
_RANKS = 16


def grid(judged: Narrowed, stages: list[str]) -> Grid | None:
    """The worst of each stage, update, rank and step; None where there is one of each.

    Args:
        judged: the tables of the stages.
        stages: canonical names, in the order of a step.

    Raises:
        DumpError: a table is damaged.
    """
    places = [judged.part(stage).places.with_columns(stage=pl.lit(stage)) for stage in stages]
    rows = pl.concat(places) if places else pl.DataFrame()
    if rows.is_empty():
        return None
    ranks = rows.get_column("rank").drop_nulls().n_unique()
    steps = sorted(rows.get_column("step").unique().to_list())
    # of a stage with one update, its number says nothing
    several = pl.col("update").max().over("stage") > 0
    rows = rows.with_columns(update=pl.when(several).then("update"))
    updates = rows.get_column("update").is_not_null().any()
    if len(steps) < 2 and ranks < 2 and not updates:
        return None
    rank = pl.col("rank") if ranks <= _RANKS else pl.lit(None, pl.Int32).alias("rank")
    known_places = rows.filter(pl.col("excess").is_not_null())
    worst = known_places.group_by("stage", rank, "update", "step").agg(pl.col("excess").max())
    known = {(s, r, u, n): excess for s, r, u, n, excess in worst.iter_rows()}
    found = []
    for stage in stages:
        own = sorted({(r, u) for s, r, u, _ in known if s == stage}, key=_last_without)
        for one, update in own or [(None, None)]:
            cells = [_cell(step, known.get((stage, one, update, step))) for step in steps]
            found.append(Row(stage, one, update, cells))
    return Grid(steps, found, updates, "key_data_row" if ranks <= _RANKS else "all_ranks")


def _last_without(place: tuple[int | None, int | None]) -> list[tuple[bool, int]]:
    """In numerical order; what has no number comes last."""
    return [(number is None, number or 0) for number in place]


def _cell(step: int, ratio: float | None) -> Cell:
    return Cell(step, ratio, 0 if ratio is None or math.isnan(ratio) else shade(ratio))
