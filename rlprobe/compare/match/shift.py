"""Functions called equally often on both sides, one side's shifted against the other's.

A call more before them on one side and a call more behind them on the other leave every name as it
is: numbers and order agree, and pair each call with its neighbour's counterpart.
"""

from __future__ import annotations

import polars as pl

_KEY = ("op", "slot", "index")
_NUMBERS = ("max", "min", "norm")
#: Statistics of one call on two devices are this near where nothing is wrong.
_NEAR = 1e-3
#: Records that a shift moves at least, and how far; two calls that changed places are none.
_FEWEST, _FURTHEST = 2, 3


def shifted(benchmark: pl.DataFrame, target: pl.DataFrame) -> bool:
    """Whether most calls that differ are those that the other side made a little sooner or later.

    Args:
        benchmark, target: records of one process (columns of :data:`.pairs.LOADED`).
    """
    function = (
        pl.col("module").is_null()
        & (pl.col("direction") == "forward")
        & pl.col("max").is_not_null()
        & pl.col("call").is_not_null()
    )
    columns = [*_KEY, "call", "shape", *_NUMBERS]
    sides = [side.lazy().filter(function).select(columns) for side in (benchmark, target)]
    apart = (
        sides[0]
        .join(sides[1].sort("call"), on=[*_KEY, "call"], suffix="_target", nulls_equal=True)
        .sort("call")
        .with_columns(own=_near(0), **{str(n): _near(n) for n in _places()})
        .filter(~pl.col("own"))
        .group_by("op")
        .agg(pl.len(), *(pl.col(str(n)).sum() for n in _places()))
    )
    moved = pl.max_horizontal(str(n) for n in _places())
    enough = (moved >= _FEWEST) & (2 * moved > pl.col("len"))
    return bool(apart.collect().select(enough.any()).item())


def _places() -> list[int]:
    return [sign * n for n in range(1, _FURTHEST + 1) for sign in (1, -1)]


def _near(places: int) -> pl.Expr:
    """Whether the benchmark's numbers are those of the target's call so many places on."""

    def other(name: str) -> pl.Expr:
        column = pl.col(f"{name}_target")
        return column.shift(-places).over(list(_KEY)) if places else column

    close = [near(name, other(name)) for name in _NUMBERS]
    return pl.all_horizontal(pl.col("shape").eq_missing(other("shape")), *close)


def near(name: str, other: pl.Expr) -> pl.Expr:
    """Whether a number is another's, up to what two devices make of it."""
    own = pl.col(name)
    apart = (own - other).abs() <= _NEAR * pl.max_horizontal(own.abs(), other.abs())
    return own.eq_missing(other) | apart.fill_null(False)
