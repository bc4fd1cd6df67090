"""Whether a run that kept tensors made the numbers that were diagnosed, and what chance makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from rlprobe.refine.seen import Seen
from rlprobe.refine.suspects import Plan
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import of_side, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run


def with_chance(tried: Seen | None, chance: Seen | None) -> Seen | None:
    """What was tried, with what the side's own runs differ by where no experiment shows chance."""
    if chance is None or (tried is not None and tried.cause == chance.cause):
        return tried
    more = [] if tried is None else tried.evidence
    return Seen(chance.cause, chance.statement, [*chance.evidence, *more])


def by_chance(runs: list[Run], plan: Plan, suspects: Suspects) -> Seen | None:
    """That one side does not make the suspect record again, where all before it repeats.

    What the side's two runs differ by must be of the size of what the sides differ by.
    """
    diagnosed = [
        Run.open(run.store, key)
        for run, key in zip(runs, (plan.benchmark, plan.target), strict=True)
    ]
    apart = [_apart(run, before, suspects) for run, before in zip(runs, diagnosed, strict=True)]
    sides = _sketched_apart(*(_record(run, suspects) for run in diagnosed))
    for side, other in ((1, 0), (0, 1)):
        own = apart[side]
        if apart[other] != 0.0 or not own or sides is None or own < _OF_ERROR * sides:
            continue
        names = [of_side(name) for name in (BENCHMARK, TARGET)]
        said = say(
            "run once more, the {side} makes other numbers of {record} (they differ by about "
            "{own:.2g}, the two sides by {apart:.2g}), while all before it repeats bit for bit, "
            "and so does the {other}",
            side=names[side],
            record=suspects.record,
            own=own,
            apart=sides,
            other=names[other],
        )
        return Seen("nondeterministic", said, [said])
    return None


#: Share of the difference of the sides that chance must make to be its cause.
_OF_ERROR = 0.5


def _apart(run: Run, diagnosed: Run, suspects: Suspects) -> float | None:
    """By how much the suspect record differs from the diagnosed run's, where all before repeats.

    0 where it repeats; None where something before it does not, or nothing tells.
    """
    both, same = _both_runs(run, diagnosed, suspects)
    other = both.filter(~same).get_column("order").min()
    own = both.filter(pl.col("name") == suspects.record)
    at = own.get_column("order").min()
    if not isinstance(at, int) or (isinstance(other, int) and other < at):
        return None
    if own.filter(~same).is_empty():
        return 0.0
    return _sketched_apart(*(_record(each, suspects) for each in (diagnosed, run)))


def _record(run: Run, suspects: Suspects) -> dict[str, Any] | None:
    """The suspect record's numbers in a run."""
    found = _numbers(run, suspects).filter(pl.col("name") == suspects.record)
    return None if found.is_empty() else found.row(0, named=True)


def _sketched_apart(one: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    """Relative L2 difference of a record in two runs, from its sketches."""
    if one is None or other is None or not one["sketch"] or not other["sketch"] or not one["norm"]:
        return None
    pair = [np.asarray(row["sketch"], dtype=np.float64) for row in (one, other)]
    return float(np.linalg.norm(pair[0] - pair[1])) / float(one["norm"])


def repeats(run: Run, diagnosed: Run, suspects: Suspects) -> tuple[bool, bool]:
    """Whether the records of a refining run are as in the run that was diagnosed.

    Returns:
        whether all are, and those up to the suspect one: running a suspect again beside its own
        call changes what comes after where it keeps something from call to call.
    """
    both, same = _both_runs(run, diagnosed, suspects)
    other = both.filter(~same)
    if other.is_empty():
        return both.height > 0, both.height > 0
    suspect = both.filter(pl.col("name") == suspects.record).get_column("order").min()
    first = other.get_column("order").min()
    until = isinstance(suspect, int) and isinstance(first, int) and first > suspect
    return False, until


_STATISTICS = ("max", "min", "mean", "norm")


def _both_runs(run: Run, diagnosed: Run, suspects: Suspects) -> tuple[pl.DataFrame, pl.Expr]:
    """Records of a refining run beside the diagnosed run's, and whether they are the same."""
    again, before = (_numbers(each, suspects) for each in (run, diagnosed))
    both = again.join(before, on=["name", "order_in_name"], suffix="_before")
    same = [pl.col(n).eq_missing(pl.col(f"{n}_before")) for n in _STATISTICS]
    return both, pl.all_horizontal(same)


def _numbers(run: Run, suspects: Suspects) -> pl.DataFrame:
    """The stage's statistics in a run, by record."""
    return (
        pl.scan_parquet(run.records(suspects.stage), glob=False)
        .filter((pl.col("step") == suspects.step) & (pl.col("rank") == suspects.rank))
        .select("name", "order", "sketch", *_STATISTICS)
        .with_columns(order_in_name=pl.int_range(pl.len()).over("name"))
        .collect()
    )
