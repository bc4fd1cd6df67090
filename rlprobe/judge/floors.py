"""The floor of every record, and whether the target is worse than the benchmark.

``floor = max(the repeats' difference, the round-off bound)``. The bound comes from compare
(:mod:`rlprobe.judge.noise`). A repeat is one draw of the device's own randomness, so a second
draw may be somewhat larger: its difference counts twice, and where repeats exceed the bound in
general (atomics, unordered reductions) the bound of their whole class is scaled up with them.

With the high-precision control the question is not whether the sides differ but whether the target
is worse: R = err(target) / max(err(benchmark), floor), errors against the control. The target's own
error is not measured directly; two independent errors add in squares, so it is
sqrt(difference**2 - err(benchmark)**2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl

from rlprobe.judge import changes

#: A repeat's difference is one draw; twice that bounds another with near certainty.
REPEAT_FACTOR = 2.0
#: The target is worse when its error is beyond this multiple of the benchmark's own.
R_LIMIT = 2.0

_JOIN = ["step", "rank", "name"]
_CLASS = ["direction", "slot"]


def with_floor(
    rows: pl.DataFrame,
    repeats: Mapping[str, pl.DataFrame],
    precise: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """:func:`with_floors` of one frame."""
    return with_floors([rows], repeats, precise)[0]


def with_floors(
    parts: Sequence[pl.DataFrame],
    repeats: Mapping[str, pl.DataFrame],
    precise: pl.DataFrame | None = None,
) -> list[pl.DataFrame]:
    """Add ``repeat_error``, ``floor``, ``excess`` and ``R``.

    Args:
        parts: target's comparison, columns of records.parquet: all ranks, a part each or together.
        repeats: the same stage's comparisons of a device with itself.
        precise: comparison of the benchmark with its high-precision control.

    ``excess`` is the difference over the floor (records.parquet's ``ratio``, lowered by what the
    repeats say). Whether that is noise, :mod:`rlprobe.judge.excuse` says.
    """
    seen = [
        frame.filter(pl.col("error").is_not_null())
        .select(*_JOIN, again=_seen("error"))
        .unique(_JOIN, keep="first")
        for frame in repeats.values()
    ]
    parts = [_repeated(part, seen) for part in parts]
    scale = _scale(parts) if repeats else None
    own = None if precise is None else _errors(precise)
    return [_against_precise(_floored(part, scale), own) for part in parts]


def _repeated(rows: pl.DataFrame, seen: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """``repeat_error``: the largest difference of a device from itself."""
    rows = rows.with_columns(repeat_error=pl.lit(None, pl.Float64))
    for every in seen:
        here = _of_ranks(every, rows)
        rows = (
            rows.join(here, on=_JOIN, how="left", maintain_order="left", nulls_equal=True)
            .with_columns(repeat_error=pl.max_horizontal("repeat_error", "again"))
            .drop("again")
        )
    return rows


def _of_ranks(control: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """A control's rows of the ranks that others are of."""
    ranks = rows.get_column("rank").unique()
    return control.filter(pl.col("rank").is_in(ranks.implode(), nulls_equal=True))


def _scale(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """``scale`` by direction and slot, of all ranks: how far repeats exceed the bound."""
    ratio = pl.col("repeat_error") / pl.col("noise")
    ratios = pl.concat(part.select("direction", "slot", ratio=ratio) for part in parts)
    typical = pl.col("ratio").filter(pl.col("ratio").is_finite()).quantile(0.99, "higher")
    scale = (REPEAT_FACTOR * typical).clip(lower_bound=1.0).fill_null(1.0)
    return ratios.group_by(_CLASS).agg(scale=scale)


def _floored(rows: pl.DataFrame, scale: pl.DataFrame | None) -> pl.DataFrame:
    if scale is None:
        rows = rows.with_columns(scale=pl.lit(1.0))
    else:
        rows = rows.join(scale, on=_CLASS, how="left", maintain_order="left", nulls_equal=True)
    floor = pl.max_horizontal(
        pl.col("noise") * pl.col("scale"), REPEAT_FACTOR * pl.col("repeat_error").fill_null(0.0)
    )
    rows = rows.with_columns(floor=pl.when(pl.col("noise").is_not_null()).then(floor))
    # records.parquet's ratio may stem from the norms; what lowers it is the floor over the bound.
    lowered = pl.col("floor") / pl.col("noise")
    rows = rows.with_columns(
        # Where a sketch saw no difference, its error is what it could not have seen.
        excess=pl.when(_unseen() & (pl.col("noise") > 0))
        .then(0.0)
        .when(pl.col("noise") > 0)
        .then(pl.col("ratio") / lowered)
        .otherwise(pl.col("error") / pl.col("floor"))
        .fill_nan(0.0)
    )
    return changes.raise_excess(rows.drop("scale"))


def _seen(column: str) -> pl.Expr:
    """An error that was measured; a sketch that saw nothing gives no repeat difference."""
    return pl.when(_unseen()).then(0.0).otherwise(pl.col(column))


def _unseen() -> pl.Expr:
    return ((pl.col("error_kind") == "sketch") & (pl.col("error_uncertainty") >= 1)).fill_null(
        False
    )


def _errors(precise: pl.DataFrame) -> pl.DataFrame:
    """The benchmark's own errors, against its control."""
    return (
        precise.filter(pl.col("error").is_not_null())
        .select(*_JOIN, own_error="error")
        .unique(_JOIN, keep="first")
    )


def _against_precise(rows: pl.DataFrame, every: pl.DataFrame | None) -> pl.DataFrame:
    if every is None:
        return rows.with_columns(R=pl.lit(None, pl.Float64), own_error=pl.lit(None, pl.Float64))
    own = _of_ranks(every, rows)
    rows = rows.join(own, on=_JOIN, how="left", maintain_order="left", nulls_equal=True)
    squared = pl.col("error").pow(2) - pl.col("own_error").pow(2)
    own_or_floor = pl.max_horizontal("own_error", "floor")
    return rows.with_columns(
        R=pl.when(pl.col("own_error").is_not_null() & (own_or_floor > 0)).then(
            squared.clip(lower_bound=0.0).sqrt() / own_or_floor
        )
    )
