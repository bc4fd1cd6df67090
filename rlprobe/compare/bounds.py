"""What statistics prove of the difference of two tensors: a lower bound, never above the truth.

With d = t - b of n elements, ``||d||`` is at least ``|max t - max b|``, ``|min t - min b|``,
``| ||t|| - ||b|| |`` and ``|mean t - mean b| * sqrt(n)``. Extremes are elements and therefore
exact. A mean and a norm are rounded: to the type of the tensor when stored, and before that while
they were summed in float32, so that only what exceeds both sides' rounding counts. ``||b||`` is at
most ``sqrt(n)`` times its largest magnitude, and at most its norm with that rounding; an infinite,
zero or absent norm bounds nothing, nor does one that the extremes contradict.
"""

from __future__ import annotations

from functools import cache

import polars as pl

STATISTICS = ("max", "min", "mean", "norm")
SIDES = ("benchmark", "target")
SMALLEST, LARGEST = 5e-324, 1.7976931348623157e308

_U32, _U64 = 2.0**-24, 2.0**-53
_NEEDED = [
    *(f"{name}_{side}" for name in (*STATISTICS, "dtype") for side in SIDES),
    *(f"{name}_diff" for name in STATISTICS),
    "size_benchmark",
]
#: Rounding of a stored statistic by the tensor's type: relative, and absolute among the denormals.
_STORED = {
    "float64": (_U64, 2.0**-1074),
    "complex128": (4 * _U64, 2.0**-1074),
    "float32": (_U32, 2.0**-149),
    "complex64": (4 * _U32, 2.0**-149),
    "float16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-134),
}
#: Any other type's statistics are taken in float32; 8-bit floats may be rounded to 2 bits.
_COARSE = (2.0**-2, 2.0**-9)
#: Summing n squares one behind the other in float32, in at least 64 sums at a time, is off by up to
#: n / 64 round-offs (torch's own norm on a CPU reaches n / 80); means are summed as a tree.
_LANES, _NORM, _MEAN = 64.0, 8.0, 64.0
#: Squares below float32's range are lost: each costs the norm at most this much.
_LOST32 = 2.0**-73
#: Sums below this overflow in none of the types that statistics are summed in.
_LARGEST_SUM = 3e38


@cache
def difference(name: str) -> pl.Expr:
    """Target minus benchmark of one statistic; 0 of equal infinities, NaN where one side is NaN."""
    b, t = pl.col(f"{name}_benchmark"), pl.col(f"{name}_target")
    # polars holds NaN for equal to NaN; inf - inf would say NaN
    return pl.when((b == t) & b.is_not_nan()).then(0.0).otherwise(t - b).alias(f"{name}_diff")


def statistics_error(table: pl.DataFrame) -> dict[str, pl.Series]:
    """Of each row ``statistics``, a lower bound of the relative L2 difference, null where unknown.

    And ``moved``: whether any statistic differs; ``impossible_norm``: whether they do and a norm is
    one that the extremes contradict, which counts for nothing.

    Args:
        table: statistics and ``*_diff`` of both sides, ``status``, ``scalar_error`` (exact, of
            scalars, for which it takes precedence), ``size_benchmark``.
    """
    differences = [pl.col(f"{name}_diff").abs().fill_nan(None) for name in STATISTICS]
    # each condition on texts is a column: it is looked at more than once
    frame = table.select(
        "scalar_error",
        finite=(pl.col("status") == "matched") | (pl.col("status") == "dtype"),
        nonfinite=pl.col("status") == "nonfinite",
        overflowed=overflow(),
        largest=pl.max_horizontal(differences),
    )
    finite = pl.col("finite")
    frame = frame.select(
        "nonfinite",
        overflowed=finite & pl.col("overflowed"),
        moved=(pl.col("largest") > 0).fill_null(False),
        error=pl.coalesce("scalar_error", pl.when(finite & (pl.col("largest") == 0)).then(0.0)),
        finite=finite,
    ).with_columns(wanted=pl.col("moved") & finite & pl.col("error").is_null())
    error = frame.get_column("error")
    impossible = pl.Series("impossible", [False]).new_from_index(0, table.height)
    rows = frame.get_column("wanted").arg_true()
    if len(rows):
        bounds = _bound(table.select(_NEEDED)[rows])
        error = error.scatter(rows, bounds.get_column("bound"))
        impossible = impossible.scatter(rows, bounds.get_column("impossible"))
    rows = frame.get_column("nonfinite").arg_true()
    if len(rows):
        # of elements beside an infinity or a NaN no statistic says anything, equal or not
        error = error.scatter(rows, table.get_column("scalar_error")[rows])
    rows = frame.get_column("overflowed").arg_true()
    zero = error[rows] == 0
    if len(rows):
        rows = rows.filter(zero.fill_null(False))
        error = error.scatter(rows, None)
    return {"statistics": error, "moved": frame.get_column("moved"), "impossible_norm": impossible}


@cache
def overflow() -> pl.Expr:
    """A norm that overflowed on one side alone: squares of huge values, or not finite elements."""
    b, t = pl.col("norm_benchmark"), pl.col("norm_target")
    return (b.is_infinite() != t.is_infinite()).fill_null(False)


@cache
def impossible(side: str) -> pl.Expr:
    """A mean or norm that no finite elements within finite extremes have: NaN, an infinite mean.

    Sums of values that are huge for their number overflow, and say nothing.
    """
    mean, norm, size = (pl.col(f"{name}_{side}") for name in ("mean", "norm", "size"))
    high, low = pl.col(f"max_{side}").abs(), pl.col(f"min_{side}").abs()
    largest = pl.when(high.is_not_null() & low.is_not_null()).then(pl.max_horizontal(high, low))
    of_mean = ~mean.is_finite() & (largest * size < _LARGEST_SUM)
    of_norm = norm.is_nan() & (largest * largest * size < _LARGEST_SUM)
    return of_mean.fill_null(False) | of_norm.fill_null(False)


def _bound(rows: pl.DataFrame) -> pl.DataFrame:
    """``bound`` of rows whose statistics differ, and whether a norm is ``impossible``."""
    rows = rows.select(
        *(f"{name}_{side}" for name in STATISTICS for side in SIDES),
        *(f"{name}_diff" for name in STATISTICS),
        root=pl.col("size_benchmark").sqrt(),
        size=pl.col("size_benchmark"),
        **{key: expr for side in SIDES for key, expr in _rounding(rows, side).items()},
    )
    for columns in _bounding():
        rows = rows.with_columns(**columns)
    return rows.select("bound", "impossible")


@cache
def _bounding() -> list[dict[str, pl.Expr]]:
    """The columns of a bound, each from those before it; ``bound`` is the last."""
    norms = pl.col("norm_benchmark").is_not_null() & pl.col("norm_target").is_not_null()
    return [
        {
            **{f"extreme_{side}": _extreme(side) for side in SIDES},
            **{f"slack_{side}": _norm_slack(side) for side in SIDES},
        },
        {
            "impossible": pl.any_horizontal(
                pl.col(f"norm_{side}").is_not_null() & _possible_norm(side).is_null()
                for side in SIDES
            ),
            **{f"norm_{side}": _possible_norm(side) for side in SIDES},
        },
        {"norm_diff": pl.when(norms).then("norm_diff")},
        {"least": _least()},
        {f"ratio_{side}": _ratio(side) for side in SIDES},
        {f"ratio_{side}": _sure(side) for side in SIDES},
        {"bound": _relative()},
        {"bound": _in_range()},
    ]


def _least() -> pl.Expr:
    """What the difference is at least."""
    mean_slack = _mean_slack("benchmark") + _mean_slack("target")
    norm_slack = pl.col("slack_benchmark") + pl.col("slack_target")
    return pl.max_horizontal(
        _finite(pl.col("max_diff").abs()) - _of_complex("max"),
        _finite(pl.col("min_diff").abs()) - _of_complex("min"),
        _finite(pl.col("norm_diff").abs(), infinite=None) - norm_slack,
        (_finite(pl.col("mean_diff").abs(), infinite=None) - mean_slack) * pl.col("root"),
    ).clip(0.0, LARGEST)


def _ratio(side: str) -> pl.Expr:
    """``least`` over what a side is at most."""
    extreme, norm = pl.col(f"extreme_{side}"), pl.col(f"norm_{side}")
    upper = norm + pl.col(f"slack_{side}")
    by_extreme = pl.when(extreme > 0).then(pl.col("least") / extreme / pl.col("root"))
    by_norm = pl.when(norm.is_finite() & (upper > 0)).then(pl.col("least") / upper)
    return pl.max_horizontal(by_extreme, by_norm.fill_nan(None))


def _sure(side: str) -> pl.Expr:
    """The ratio; 1 is the truth of a side whose norm may have been lost to rounding, if it is 0."""
    extreme, norm, ratio = (pl.col(f"{name}_{side}") for name in ("extreme", "norm", "ratio"))
    sure = (norm > pl.col(f"slack_{side}")) | (extreme > 0)
    return pl.when(sure).then(ratio).otherwise(ratio.clip(upper_bound=1.0))


def _relative() -> pl.Expr:
    """The benchmark's ratio, or the target's where the benchmark is zero."""
    zero = pl.col("extreme_benchmark") == 0
    return (
        pl.when(pl.col("least") == 0)
        .then(0.0)
        .when(zero & (pl.col("extreme_target") > 0))
        .then(1.0)
        .when(zero)
        .then(pl.col("ratio_target").clip(upper_bound=1.0))
        .otherwise(pl.col("ratio_benchmark"))
    )


def _in_range() -> pl.Expr:
    """No error that is there is rounded to zero, or to infinity."""
    error = pl.col("bound")
    nothing = error.is_null() | (pl.col("least") == 0)
    return pl.when(nothing).then(error).otherwise(error.clip(SMALLEST, LARGEST))


def _possible_norm(side: str) -> pl.Expr:
    """A norm; null where the extremes contradict it: it is in ``[max|x|, sqrt(n) max|x|]``."""
    norm, extreme, slack = (pl.col(f"{name}_{side}") for name in ("norm", "extreme", "slack"))
    # what rounds a complex extreme up is less than what rounds a norm
    low = norm.is_finite() & (norm + slack < extreme * (1 - 2 * pl.col(f"stored_{side}")))
    high = norm.is_finite() & (norm - slack > extreme * pl.col("root") * (1 + _U32))
    return pl.when((low | high).fill_null(False)).then(None).otherwise(norm)


def _finite(value: pl.Expr, infinite: float | None = LARGEST) -> pl.Expr:
    """A difference that overflowed is at least the largest number there is."""
    value = value.fill_nan(None)
    return pl.when(value.is_infinite()).then(pl.lit(infinite, pl.Float64)).otherwise(value)


def _extreme(side: str) -> pl.Expr:
    """The largest magnitude of a side, from its extremes."""
    largest, least = pl.col(f"max_{side}").abs(), pl.col(f"min_{side}").abs()
    found = pl.max_horizontal(largest, least)
    # no modulus but that of zero is rounded to zero
    rounded = pl.when(found > 0).then(found * (1 + pl.col(f"modulus_{side}")) + _lost(side))
    both = largest.is_not_null() & least.is_not_null()
    return pl.when(both).then(rounded.otherwise(0.0))


def _lost(side: str) -> pl.Expr:
    """What rounding costs a modulus among the denormals; 0 of real types."""
    return pl.when(pl.col(f"modulus_{side}") > 0).then(pl.col(f"tiny_{side}")).otherwise(0.0)


def _of_complex(name: str) -> pl.Expr:
    """Extremes of complex tensors are magnitudes, which are rounded."""
    b, t = (
        pl.col(f"{name}_{side}").abs() * pl.col(f"modulus_{side}") + _lost(side)
        for side in ("benchmark", "target")
    )
    return b + t


def _rounding(rows: pl.DataFrame, side: str) -> dict[str, pl.Expr]:
    """Columns ``stored``, ``tiny``, ``summed`` and ``modulus`` of a side, from its types."""
    column = f"dtype_{side}"
    names = rows.get_column(column).drop_nulls().unique().to_list()
    found = {name: _STORED.get(name.rpartition(".")[2]) or _other(name) for name in names}
    wide = {name: name.rpartition(".")[2] in ("float64", "complex128") for name in names}

    def of(table: dict[str, float], default: float) -> pl.Expr:
        return pl.col(column).replace_strict(table, default=default, return_dtype=pl.Float64)

    return {
        f"stored_{side}": of({name: pair[0] for name, pair in found.items()}, _COARSE[0]),
        f"tiny_{side}": of({name: pair[1] for name, pair in found.items()}, _COARSE[1]),
        f"summed_{side}": of({name: _U64 if wide[name] else _U32 for name in names}, _U32),
        f"modulus_{side}": of(
            {name: found[name][0] if "complex" in name else 0.0 for name in names}, 0.0
        ),
    }


def _other(name: str) -> tuple[float, float]:
    whole = name.rpartition(".")[2].startswith(("int", "uint", "bool"))
    return (_U32, 2.0**-149) if whole else _COARSE


def _norm_slack(side: str) -> pl.Expr:
    relative = pl.col(f"stored_{side}") + pl.col(f"summed_{side}") * (
        pl.col("size") / _LANES + _NORM
    )
    lost = pl.when(pl.col(f"summed_{side}") < _U32).then(1.6e-162).otherwise(_LOST32)
    return pl.col(f"norm_{side}") * relative + pl.col(f"tiny_{side}") + lost * pl.col("root")


def _mean_slack(side: str) -> pl.Expr:
    """Rounding of a mean; without extremes the norm bounds the magnitudes that were summed."""
    norm = pl.col(f"norm_{side}")
    typical = pl.coalesce(
        f"extreme_{side}", pl.when(norm.is_finite()).then(norm + pl.col(f"slack_{side}"))
    )
    return (
        pl.col(f"mean_{side}").abs() * pl.col(f"stored_{side}")
        + pl.col(f"tiny_{side}")
        + typical * pl.col(f"summed_{side}") * _MEAN
    )
