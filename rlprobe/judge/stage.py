"""A stage of the target's comparison at the judged step: every rank's rows with their floors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from rlprobe.judge import (
    changes,
    compared,
    execution,
    floors,
    held,
    kept,
    layers,
    nesting,
    noise,
    propagated,
    shards,
    sketched,
)
from rlprobe.judge.alike import Alike
from rlprobe.judge.excuse import Excuse, begin, reduce
from rlprobe.judge.excuses import (
    all_zero,
    decisions,
    devices,
    earlier_updates,
    few_numbers,
    generated,
    inherited,
    masked_value,
    near_ties,
    positions,
    recomposed,
    rounded_away,
    unwritten,
)
from rlprobe.judge.execution import Call
from rlprobe.judge.inputs import Results
from rlprobe.judge.logical import joining, layout
from rlprobe.judge.nesting import Told
from rlprobe.roles import HIGH_PRECISION, REPEAT, REPEAT_TARGET, TARGET
from rlprobe.said import Said

#: What floors are made of; nothing looks at it after them.
_OF_FLOORS = ("noise", "ratio", "repeat_error")


@dataclass(frozen=True)
class Process:
    """One rank's rows of a stage's judged step."""

    rank: int
    rows: pl.DataFrame
    calls: list[Call] = field(repr=False)
    #: Choices of experts that fell the other way at near ties (:mod:`near_ties`).
    near_ties: int = 0
    #: Blocks that agree and hold their rows otherwise inside (:mod:`recomposed`).
    recomposed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """One stage of the target's comparison."""

    name: str
    step: int
    processes: list[Process]
    #: Why records of micro-batches cannot be judged by position; None where they can.
    misplaced: Said | None = None
    #: Micro-batches before weights first change within the stage; None where they do once.
    before_update: int | None = None
    #: Why rows stand for whole stages (:mod:`rlprobe.judge.logical`), and what is known of them;
    #: None where they are of single calls.
    laid_out: Said | None = None
    logical: joining.Joined | None = field(default=None, repr=False)
    #: Sketches of rows that stand for several shards.
    joined: sketched.Joined = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> pl.DataFrame:
        """All ranks' rows."""
        return pl.concat([process.rows for process in self.processes])

    def excused(self, excuses: list[Excuse]) -> Stage:
        """The stage after excuses that hold for all its ranks."""
        if not excuses:
            return self
        processes = [
            dataclasses.replace(process, rows=reduce(process.rows, excuses))
            for process in self.processes
        ]
        return dataclasses.replace(self, processes=processes)


def load(results: Results, stage: str, step: int, products: float = 0.0) -> Stage | None:
    """The target's comparison of a stage at one step; None where nothing was compared.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        products: see :func:`rlprobe.judge.noise.annotate`.

    Raises:
        DumpError: a table is damaged.
    """
    lazy = compared.scan(results, TARGET, stage, compared.COLUMNS)
    if lazy is None:
        return None
    here = lazy.filter(pl.col("step") == step)
    parts = compared.by_rank(here, results.compared(TARGET, stage))
    if not parts:
        return None
    if layout.available(results, stage, step):
        laid_out = _laid_out(results, stage, step, parts, products)
        if laid_out is not None:
            return laid_out
    sketches = _join_shards(parts, results, stage, step)
    told = nesting.of(results, stage, step)
    found = _processes(results, stage, step, parts, sketches, products, told)
    rows = [process.rows for process in found]
    misplaced = positions.difference(results, stage, step, rows)
    before = _before_update(rows, misplaced)
    judged = Stage(stage, step, found, misplaced, before, joined=sketches)
    return judged.excused(positions.excuses(misplaced))


def _join_shards(
    parts: list[pl.DataFrame], results: Results, stage: str, step: int
) -> sketched.Joined:
    """Let one row stand for what the sides have sharded otherwise; the sketches of these.

    Args:
        parts: a frame a rank; what is joined is replaced in them.
    """
    whole = shards.joined(pl.concat(parts), results, stage, step)
    if whole.changed:
        parts[:] = whole.rows.partition_by("rank", maintain_order=True)
    return whole.sketches


def _laid_out(
    results: Results, stage: str, step: int, parts: list[pl.DataFrame], products: float
) -> Stage | None:
    """The stage by records of whole stages; None where those of single calls have partners."""
    calls = [execution.timeline(part)[0] for part in parts]
    misplaced = positions.difference(results, stage, step, calls)
    why = misplaced or layout.unlike(results, stage)
    if why is None:
        return None
    whole = shards.joined(pl.concat(parts), results, stage, step, every=True)
    before = _before_update(calls, misplaced)
    joined = joining.join(whole.rows, results, stage, step, before)
    sketches = {**whole.sketches, **joined.sketches}
    rows = joined.rows.partition_by("rank", maintain_order=True)
    judged = Stage(
        stage,
        step,
        _processes(results, stage, step, rows, sketches, products, {}),
        before_update=before,
        laid_out=why,
        logical=joined,
        joined=sketches,
    )
    return judged.excused([*joining.excuses(joined), *positions.of_losses(misplaced)])


def _processes(
    results: Results,
    stage: str,
    step: int,
    parts: list[pl.DataFrame],
    sketches: sketched.Joined,
    products: float,
    told: Mapping[int, Told],
) -> list[Process]:
    """Every rank's rows with floors and excuses, in the order of ranks.

    What ranks have in common (layers, how far repeats are from each other) is found over all of
    them; the rest is done rank by rank, and what a rank's rows were before is let go of.

    Args:
        parts: a frame a rank; emptied.
        sketches: of rows that stand for several shards.
        products: see :func:`rlprobe.judge.noise.annotate`.
        told: how calls nest, by rank, where dumps say it (:mod:`rlprobe.judge.nesting`).
    """
    floored = _with_floors(results, stage, step, parts, sketches, products)
    parts.clear()
    alike, found = Alike(), []
    while floored:
        rows = floored.pop()
        rank = int(rows.item(0, "rank"))
        one = _process(rank, rows, results.plan.one_precision, told.get(rank))
        found.append(
            dataclasses.replace(one, rows=alike.rows(one.rows), calls=alike.calls(one.calls))
        )
    return sorted(found, key=lambda process: process.rank)


def _with_floors(
    results: Results,
    stage: str,
    step: int,
    parts: list[pl.DataFrame],
    sketches: sketched.Joined,
    products: float,
) -> list[pl.DataFrame]:
    repeats = {}
    for pair in (REPEAT, REPEAT_TARGET):
        frame = compared.control(results, pair, stage, step)
        if frame is not None:
            repeats[pair] = frame
    precise = compared.control(results, HIGH_PRECISION, stage, step)
    kept.with_rounding(parts, results, stage, step)
    held.with_norms(parts, results, stage, step)
    errors = changes.dense(parts, results, stage, step, sketches)
    losses = pl.concat(part.filter(pl.col("slot") == "loss") for part in parts)
    given = propagated.inherited(results, stage, step, losses)
    every_layer = set[int]().union(*map(layers.of, parts))

    def floored(given: noise.Inherited | None) -> list[pl.DataFrame]:
        # Here rather than in compare: a better bound needs no comparison made again.
        bounded = [
            noise.annotate(
                changes.with_dense(part, errors),
                products=products,
                inherited=given,
                one_precision=results.plan.one_precision,
                every_layer=every_layer,
            )
            for part in parts
        ]
        found = floors.with_floors(bounded, repeats, precise)
        bounded.clear()
        return [rows.drop(_OF_FLOORS) for rows in found]

    own = floored(None)
    if given is None:
        return own
    return [inherited.with_own(*both) for both in zip(floored(given), own, strict=True)]


def _process(
    rank: int, rows: pl.DataFrame, one_precision: bool, told: Told | None = None
) -> Process:
    ordered, calls = execution.timeline(rows, told)
    moved = earlier_updates.inherited(ordered)
    ordered = begin(ordered, one_precision, later_updates=moved is not None)
    ordered = reduce(ordered, generated.excuses(ordered))
    ordered = reduce(ordered, devices.excuses(ordered))
    ordered = reduce(ordered, unwritten.excuses(ordered))
    ordered = reduce(ordered, decisions.excuses(ordered))
    ordered = reduce(ordered, inherited.excuses(ordered))
    ordered = reduce(ordered, earlier_updates.excuses(ordered, moved or {}))
    ordered = reduce(ordered, all_zero.excuses(ordered))
    ordered = reduce(ordered, rounded_away.excuses(ordered))
    ties, flips = near_ties.excuses(ordered)
    ordered = reduce(ordered, ties)
    ordered = reduce(ordered, masked_value.excuses(ordered))
    ordered = reduce(ordered, few_numbers.excuses(ordered))
    inside, blocks = recomposed.excuses(ordered, calls)
    return Process(rank, reduce(ordered, inside), calls, flips, blocks)


def _before_update(parts: Sequence[pl.DataFrame], misplaced: Said | None) -> int | None:
    """Micro-batches before the first of several updates; 0 where they hold other samples."""
    columns = ["slot", "call", "before_update", "phase", "micro_batch"]
    rows = pl.concat(part.select(columns) for part in parts)
    updates = rows.filter(pl.col("slot") == "grad_reduced").get_column("call").n_unique()
    if updates <= 1 and rows.get_column("before_update").all():
        return None
    if misplaced is not None:
        return 0
    early = rows.filter(pl.col("before_update") & (pl.col("phase") < execution.GRADIENTS))
    last = early.get_column("micro_batch").max()
    return int(last) + 1 if isinstance(last, int) else 0
