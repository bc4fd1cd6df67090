"""A row of a stage's judged table: one record, as whoever explains it reads it.

A key is a column: of a comparison (:data:`rlprobe.judge.compared.COLUMNS`), of the order of
execution (:mod:`rlprobe.judge.execution`), of its floor, and of what judging made of it
(:func:`rlprobe.judge.excuse.begin`). None stands for what was not recorded or does not apply, and a
key may be missing: a result of a stage that differs while all its modules agree has a name, a slot,
an error and its floor, and no more.
"""

from __future__ import annotations

from typing import TypedDict, cast

import polars as pl


class Row(TypedDict, total=False):
    """One tensor of one call, in one stage, step and rank."""

    #: Where rows of several stages are together.
    stage: str
    step: int
    rank: int | None
    #: In execution order of the benchmark's process.
    order: int
    name: str
    name_benchmark: str | None
    name_target: str | None
    module: str | None
    op: str | None
    call: int | None
    #: forward, backward or update.
    direction: str
    #: input, output, parameters, grad, grad_reduced, grad_clipped, change or loss.
    slot: str
    index: str | None
    #: Of :data:`rlprobe.compare.measures.STATUSES`, with its reason.
    status: str
    reason: str | None

    dtype_benchmark: str | None
    dtype_target: str | None
    shape_benchmark: list[int] | None
    shape_target: list[int] | None
    value_benchmark: str | None
    value_target: str | None
    digest_benchmark: str | None
    digest_target: str | None
    max_benchmark: float | None
    max_target: float | None
    min_benchmark: float | None
    min_target: float | None
    mean_benchmark: float | None
    mean_target: float | None
    norm_benchmark: float | None
    norm_target: float | None
    #: Target minus benchmark.
    max_diff: float | None
    min_diff: float | None
    mean_diff: float | None
    norm_diff: float | None

    #: Relative L2 difference, how it is known (tensor, sketch, statistics, digest), and one
    #: standard deviation of it, relative.
    error: float | None
    error_kind: str | None
    error_uncertainty: float | None
    #: What a multiple of the benchmark leaves (:mod:`rlprobe.judge.multiples`).
    residual: float | None
    #: Of a change's part that all elements share (:mod:`rlprobe.judge.changes`).
    dense_error: float | None
    noise_dense: float | None

    #: Path of the module whose call it ran in, where the dump says so.
    within: str | None
    #: Number of the call in its process, of the micro-batch and of the update it belongs to.
    call_id: int
    micro_batch: int
    update: int
    #: Of :data:`rlprobe.judge.execution.FORWARD` to ``CHANGES``.
    phase: int
    #: Where it stands among all records of its process.
    sequence: int

    floor: float | None
    #: Multiple of the floor; infinite where there is no round-off.
    excess: float | None
    #: Error over the error against high precision.
    R: float | None
    judged: bool
    beyond: bool
    other_format: bool
    excused_by: str | None
    unjudged_because: str | None


def first(rows: pl.DataFrame) -> Row | None:
    """The first of a stage's rows; None where there is none."""
    return cast("Row", rows.row(0, named=True)) if rows.height else None


def each(rows: pl.DataFrame) -> list[Row]:
    """A stage's rows."""
    return cast("list[Row]", rows.to_dicts())


def number(row: Row, name: str) -> float | None:
    """The number in a column whose name is put together, such as ``max_benchmark``."""
    return cast("float | None", row.get(name))


def columns_where(rows: pl.DataFrame, which: pl.Expr, *columns: str) -> pl.DataFrame:
    """Columns of the rows for which ``which`` holds.

    What ranks have in common is held once in all rows of a stage, and once for each of them in what
    is filtered: where that may be most rows, a few columns are asked for.
    """
    needed = dict.fromkeys([*columns, *which.meta.root_names()])
    return rows.select(*needed).filter(which).select(*columns)
