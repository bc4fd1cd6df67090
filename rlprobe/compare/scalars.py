"""Scalars, and extremes of integer tensors that no float64 holds: differences without rounding."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from fractions import Fraction

import polars as pl

from rlprobe.compare.bounds import LARGEST, SMALLEST
from rlprobe.dumps.schema import FLOATS, WHOLE

#: Types whose values are numbers, as dumps name them, Python's and numpy's; any other scalar is a
#: text.
NUMBERS = (
    *("bool", "bool_"),
    *WHOLE,
    *FLOATS,
)
_LOWEST = {"nan", "inf", "-inf"}
#: Digits that Python reads at once, whatever its limit is set to; it may be no lower than 640.
_SHORT = 640
#: Longer ones are texts: a number of these takes a hundredth of a second.
_DIGITS = re.compile(r"-?[0-9]{1,20000}")


def _scalar(side: str) -> pl.Expr:
    return pl.col(f"shape_{side}").is_null() & pl.col(f"value_{side}").is_not_null()


def nonfinite(side: str) -> pl.Expr:
    """Whether a side is a float that is not finite."""
    return (
        pl.col(f"dtype_{side}").is_in(FLOATS) & pl.col(f"value_{side}").is_in(list(_LOWEST))
    ).fill_null(False)


def exact(table: pl.DataFrame) -> pl.DataFrame:
    """Add ``scalar_error`` and ``same_scalar``, and mend ``max_diff`` and ``min_diff``.

    ``scalar_error`` is ``|t - b| / |b|`` of numbers (relative to the target where the benchmark is
    zero), 1 of texts that differ, null of anything else. ``max_diff`` of a scalar is its
    difference. ``same_scalar``: of one type and one text, NaN excepted.
    """
    said = [table.get_column(f"value_{side}") for side in ("benchmark", "target")]
    rows = (said[0].is_not_null() | said[1].is_not_null()).arg_true()
    table = table.with_columns(scalar_error=pl.lit(None, pl.Float64), same_scalar=pl.lit(False))
    if not len(rows):
        return table
    some = _measured(table.select(_NEEDED)[rows])
    return table.with_columns(
        table.get_column(name).scatter(rows, some.get_column(name))
        for name in ("scalar_error", "same_scalar", "max_diff", "min_diff")
    )


_NEEDED = [
    *(
        f"{name}_{side}"
        for name in ("order", "shape", "dtype", "value", "max", "min")
        for side in ("benchmark", "target")
    ),
    "status",
    "max_diff",
    "min_diff",
    "scalar_error",
    "same_scalar",
]


def _measured(table: pl.DataFrame) -> pl.DataFrame:
    """:func:`exact` of rows of which a side has a text."""
    both = _scalar("benchmark") & _scalar("target") & (pl.col("status") != "unreadable")
    same_text = pl.col("value_benchmark") == pl.col("value_target")
    same_type = pl.col("dtype_benchmark") == pl.col("dtype_target")
    number = pl.col("dtype_benchmark").is_in(NUMBERS) & pl.col("dtype_target").is_in(NUMBERS)
    nan = pl.col("dtype_benchmark").is_in(FLOATS) & (pl.col("value_benchmark") == "nan")
    same = (both & same_text & ~(nan & number)).fill_null(False)
    table = table.with_columns(
        scalar_error=pl.when(same).then(0.0),
        same_scalar=same & same_type.fill_null(False),
        max_diff=pl.when(same & number)
        .then(pl.coalesce("max_diff", pl.lit(0.0)))
        .otherwise("max_diff"),
    )
    differing = (
        pl.col("value_benchmark").ne_missing(pl.col("value_target"))
        & pl.col("order_benchmark").is_not_null()
        & pl.col("order_target").is_not_null()
        & (pl.col("status") != "unreadable")
    )
    rows = table.select(differing.fill_null(False)).to_series().arg_true()
    return _with_differing(table, rows) if len(rows) else table


def _with_differing(table: pl.DataFrame, rows: pl.Series) -> pl.DataFrame:
    """The same with what rows of different texts differ by."""
    columns = [
        f"{name}_{side}"
        for name in ("shape", "dtype", "value", "max", "min")
        for side in ("benchmark", "target")
    ]
    chosen = table[rows].with_columns(pl.col("shape_benchmark", "shape_target").is_not_null())
    errors: list[float | None] = []
    largest: list[float | None] = []
    least: list[float | None] = []
    for row in chosen.select(*columns, "max_diff", "min_diff").iter_rows():
        tensors, dtypes, values = row[0:2], row[2:4], row[4:6]
        if all(tensors):
            for key, at, differences in (("Max", 6, largest), ("Min", 8, least)):
                b, t = (_extreme(values[n], key, row[at + n]) for n in (0, 1))
                differences.append(row[at // 2 + 7] if b is None or t is None else _float(t - b))
            errors.append(None)
            continue
        least.append(row[11])
        if any(tensors) or None in values:
            largest.append(row[10])
            errors.append(None)
            continue
        difference, error = measured(dtypes, values)
        largest.append(difference)
        errors.append(error)
    changed = {"scalar_error": errors, "max_diff": largest, "min_diff": least}
    return table.with_columns(
        table.get_column(name).scatter(rows, pl.Series(new, dtype=pl.Float64))
        for name, new in changed.items()
    )


def measured(dtypes: tuple[str, str], values: tuple[str, str]) -> tuple[float | None, float | None]:
    """Difference and relative error of two scalars whose texts are not the same.

    Returns:
        Target minus benchmark (null unless both are numbers), and the error (null where a number
        is not finite).
    """
    b, t = (number(dtype, text) for dtype, text in zip(dtypes, values, strict=True))
    if b is None or t is None:
        return None, 0.0 if values[0] == values[1] else 1.0
    if isinstance(b, float) or isinstance(t, float):
        # at least one of them is not finite
        difference = float(t) - float(b)
        return (0.0, 0.0) if b == t else (difference, None)
    return _float(t - b), _relative(b, t)


def number(dtype: str, text: str) -> Fraction | float | None:
    """A scalar's exact value, a float where it is not finite; None for what is no number."""
    if dtype not in NUMBERS:
        return None
    if text in ("True", "False"):
        return Fraction(text == "True")
    try:
        if dtype in FLOATS:
            value = float(text)
            return Fraction(value) if math.isfinite(value) else value
        return Fraction(_whole(text))
    except (ValueError, ArithmeticError):
        return None


def _whole(text: str) -> int:
    """A whole number; Python's own reading ends at some thousand digits.

    Raises:
        ValueError, ArithmeticError: it is none.
    """
    if len(text) <= _SHORT or not _DIGITS.fullmatch(text):
        return int(text)
    return int(Decimal(text))


def _relative(b: Fraction, t: Fraction) -> float:
    scale = abs(b) or abs(t)
    if b == t:
        return 0.0
    return min(max(_float(abs(t - b) / scale), SMALLEST), LARGEST)


def _float(value: Fraction | int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _extreme(text: str | None, key: str, rounded: float | None) -> int | None:
    """An exact extreme of an integer tensor, whether it fits a float64 or not.

    ``text`` is what :mod:`rlprobe.dumps.dumpjson` keeps where one does not.
    """
    if text is not None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict):
            return None
        return found[key] if type(found.get(key)) is int else None
    if rounded is None or not math.isfinite(rounded) or rounded != int(rounded):
        return None
    return int(rounded)
