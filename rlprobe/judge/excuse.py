"""A ground on which records are not held against their floor, and the one place that applies it.

An excuse is a value: which rows, against which floor they are held instead, and the reason. What
it makes of ``judged``, ``floor``, ``excess`` and ``beyond`` is :func:`reduce`'s business alone, so
that every row knows who excused it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

from rlprobe.judge import reasons
from rlprobe.judge.floors import R_LIMIT
from rlprobe.judge.roundoff import UNIT

#: Not finite on one side alone: beyond anything, and hardly any excuse holds.
LOPSIDED: pl.Expr = ((pl.col("status") == "nonfinite") & (pl.col("reason") != "both")).fill_null(
    False
)


@dataclass(frozen=True)
class Excuse:
    """Rows of a stage, and what they are held against."""

    #: Of :data:`reasons.EXCUSES` or :data:`reasons.UNJUDGED`.
    reason: str
    #: Boolean, over the columns of the stage's rows.
    rows: pl.Expr
    #: They are held against this if it is larger than their own; None: against nothing.
    floor: float | pl.Expr | None = None
    #: Their multiple of that floor; None: it follows from the floor.
    excess: pl.Expr | None = None
    #: Holds of what is not finite on one side alone, too; only where numbers mean nothing.
    nonfinite: bool = False


def begin(
    rows: pl.DataFrame, one_precision: bool = False, later_updates: bool = False
) -> pl.DataFrame:
    """Add ``judged``, ``beyond``, ``excused_by`` and ``unjudged_because``, before any excuse.

    Args:
        rows: :func:`execution.timeline`'s with :func:`floors.with_floor`'s columns.
        one_precision: like devices were asked for one precision.
        later_updates: what runs after the stage's first update is judged too
            (:mod:`rlprobe.judge.excuses.earlier_updates` widens its floors).

    A record that is not finite on one side only is beyond anything. So is, where one precision was
    asked for, a module's output of another format (``other_format``): whatever its numbers are, the
    module computes otherwise.
    """
    # A mask may be of booleans on one side and of numbers to add on the other: two ways to say the
    # same, which their numbers cannot tell.
    kinds = [pl.col(f"dtype_{side}").is_in(list(UNIT)) for side in ("benchmark", "target")]
    unlike = (kinds[0] != kinds[1]).fill_null(False) & ~LOPSIDED
    status = pl.col("status")
    unmeasured = (
        pl.when(status.is_in(["benchmark_only", "target_only"]))
        .then(pl.lit(reasons.NO_PARTNER))
        .when(status == "unreadable")
        .then(pl.lit(reasons.UNREADABLE))
        .when(status == "shape")
        .then(pl.lit(reasons.OTHER_SHAPE))
        .when(status == "nonfinite")
        .then(pl.lit(reasons.BOTH_NONFINITE))
        .otherwise(pl.lit(reasons.NO_NUMBERS))
    )
    because = (
        pl.when(pl.col("error").is_null() & ~LOPSIDED)
        .then(unmeasured)
        .when(unlike)
        .then(pl.lit(reasons.OTHER_KIND))
    )
    after = pl.when(~pl.col("before_update") & ~pl.lit(later_updates)).then(
        pl.lit(reasons.AFTER_UPDATE)
    )
    floats = [pl.col(f"dtype_{side}").str.starts_with("torch.") & kind for side, kind in
              zip(("benchmark", "target"), kinds, strict=True)]  # fmt: skip
    other_format = (
        pl.all_horizontal(*floats)
        & (pl.col("dtype_benchmark") != pl.col("dtype_target"))
        & (pl.col("slot") == "output")
        & pl.lit(one_precision)
    ).fill_null(False)
    further = (pl.col("excess") > 1).fill_null(False)
    no_worse = further & (pl.col("R") <= R_LIMIT).fill_null(False) & ~LOPSIDED & ~other_format
    return (
        rows.with_columns(
            excess=pl.when(other_format & ~(pl.col("excess") > 1).fill_null(False))
            .then(float("inf"))
            .when(~unlike)
            .then(pl.col("excess")),
            other_format=other_format,
            excused_by=pl.lit(None, pl.String),
            unjudged_because=pl.coalesce(because, after),
        )
        .with_columns(judged=pl.col("unjudged_because").is_null())
        .with_columns(
            excused_by=pl.when(pl.col("judged") & no_worse).then(pl.lit(reasons.NO_WORSE)),
            beyond=(
                pl.col("judged") & ((further & ~no_worse) | LOPSIDED | pl.col("other_format"))
            ).fill_null(False),
        )
    )


def reduce(rows: pl.DataFrame, excuses: Iterable[Excuse]) -> pl.DataFrame:
    """The rows after excuses, in their order: a floor is the widest of its own, a reason the first.

    Raises:
        ValueError: a reason is in neither list.
    """
    for excuse in excuses:
        if excuse.reason not in reasons.EXCUSES and excuse.reason not in reasons.UNJUDGED:
            raise ValueError(f"reason {excuse.reason!r} is in no list of judge/reasons.py")
        rows = _left_out(rows, excuse) if excuse.floor is None else _widened(rows, excuse)
    return rows


def _left_out(rows: pl.DataFrame, excuse: Excuse) -> pl.DataFrame:
    excused = excuse.reason in reasons.EXCUSES
    # a ground that is known says more than that there is no partner
    alone = (pl.col("unjudged_because") == reasons.NO_PARTNER).fill_null(False)
    says_more = excused or excuse.reason == reasons.OTHER_MODULES
    open_ = pl.col("judged") | alone if says_more else pl.col("judged")
    mine = excuse.rows.fill_null(False) & open_
    if not excuse.nonfinite:
        mine = mine & ~LOPSIDED
    column, other = ("excused_by", "unjudged_because")[:: 1 if excused else -1]
    rows = rows.with_columns(_mine=mine)
    return rows.with_columns(
        pl.when("_mine").then(pl.lit(excuse.reason)).otherwise(column).alias(column),
        judged=pl.col("judged") & ~pl.col("_mine"),
        beyond=pl.col("beyond") & ~pl.col("_mine"),
        **{other: pl.when(~pl.col("_mine")).then(other)},
    ).drop("_mine")


def _widened(rows: pl.DataFrame, excuse: Excuse) -> pl.DataFrame:
    """Excused is what would be beyond its own floor and is within the wider one."""
    given = excuse.floor if isinstance(excuse.floor, pl.Expr) else pl.lit(excuse.floor)
    floor = pl.max_horizontal("floor", given)
    excess, beyond = (
        (pl.col("excess") * pl.col("floor") / floor, pl.col("excess") * pl.col("floor") > floor)
        if excuse.excess is None
        else (excuse.excess, excuse.excess > 1)
    )
    mine = excuse.rows.fill_null(False) & pl.col("floor").is_not_null() & ~LOPSIDED
    rows = rows.with_columns(_mine=mine, _was=pl.col("beyond"))
    return (
        rows.with_columns(
            beyond=pl.when("_mine")
            .then(pl.col("beyond") & beyond)
            .otherwise("beyond")
            .fill_null(False),
            excess=pl.when("_mine").then(excess).otherwise("excess"),
            floor=pl.when("_mine").then(floor).otherwise("floor"),
        )
        .with_columns(
            excused_by=pl.when(pl.col("_was") & ~pl.col("beyond"))
            .then(pl.lit(excuse.reason))
            .otherwise("excused_by")
        )
        .drop("_mine", "_was")
    )
