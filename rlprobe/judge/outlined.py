"""One record of a comparison, as a line of its outline says it."""

from __future__ import annotations

import math

from rlprobe.compare import lacking, measures, scalars
from rlprobe.judge import decisive
from rlprobe.judge.row import Row

#: Of a statistic, an error is at least this; of elements, it is this.
_BOUND = "statistics"
_WORDS = {decisive.NORM: " of the norm", decisive.DENSE: " of what all elements share"}


def names(row: Row) -> str:
    """What both sides call it, and where it ran."""
    benchmark, target = row.get("name_benchmark"), row.get("name_target")
    name = lacking.short(str(benchmark or row.get("name")))
    if benchmark and target and benchmark != target:
        name += f" | target: {lacking.short(str(target))}"
    within = row.get("within")
    # a module's name says itself where it is
    return f"{name}, in {lacking.short(within)}" if within and not row.get("module") else name


def is_bound(row: Row) -> bool:
    """Whether its error is at least what is said, as of statistics, and no more is known."""
    return row.get("error_kind") == _BOUND and _values(row) is None


def size(row: Row) -> str:
    """By how much it differs, and how many times what round-off allows."""
    measure = decisive.of(row)
    values = _values(row)
    if values is not None and not _is_number(row):
        return values
    if measure.error is None:
        return values or _of_unknown_size(row)
    least = "at least " if is_bound(row) else ""
    of = _WORDS.get(measure.name, "")
    text = f"error{of} {least}{measure.error:.3g}"
    text = text if values is None else f"{values}, {text}"
    excess = row.get("excess")
    if not isinstance(excess, float):
        return text
    if math.isinf(excess):
        return f"{text}; there is no round-off in it"
    return f"{text}, {times(excess)} what round-off allows ({measure.floor or 0.0:.2g})"


def _of_unknown_size(row: Row) -> str:
    """What is known of a difference that no number is given for."""
    if row.get("status") != measures.NONFINITE:
        return "it differs, and statistics do not say by how much"
    side = row.get("reason")
    return (
        "not finite on both sides, and not the same"
        if side not in ("benchmark", "target")
        else f"not finite on the {side} only"
    )


def _values(row: Row) -> str | None:
    """Both values of an argument that is no tensor; None of a tensor."""
    sides = [row.get(f"value_{side}") for side in ("benchmark", "target")]
    shapes = [row.get(f"shape_{side}") for side in ("benchmark", "target")]
    if any(shape is not None for shape in shapes) or None in sides:
        return None
    return " against ".join(lacking.short(str(value)) for value in sides)


def _is_number(row: Row) -> bool:
    return {row.get("dtype_benchmark"), row.get("dtype_target")} <= set(scalars.NUMBERS)


def times(excess: float) -> str:
    """How many times what is allowed."""
    return f"{excess:,.0f} times" if excess >= 10 else f"{excess:.1f} times"
