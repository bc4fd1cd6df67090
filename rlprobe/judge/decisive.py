"""By which of its numbers a record is beyond its floor.

Elements may differ by less than their floor and the norm, or what all elements share, by more than
its own (:mod:`rlprobe.judge.noise`, :mod:`rlprobe.judge.changes`). Whoever checks a ratio
needs the two numbers that it is of.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlprobe.compare import measures
from rlprobe.judge import changes
from rlprobe.judge.outcomes import OTHER_FORMAT, SINGLE_VALUE
from rlprobe.judge.row import Row

ELEMENTS, NORM, DENSE = "elements", "norm", "dense"
#: A ratio is another number's where elements account for less of it than this.
_MOST = 0.95


@dataclass(frozen=True)
class Measure:
    """A difference and its floor, both relative; their quotient is the record's ratio."""

    name: str
    error: float | None
    floor: float | None
    #: Whether the error was made of a sketch, which tells it to some percent.
    about: bool = False


def of(row: Row) -> Measure:
    """The measure by which a row of a stage is judged."""
    error, floor, excess = row.get("error"), row.get("floor"), row.get("excess")
    if row.get("status") == measures.NONFINITE and row.get("reason") in ("benchmark", "target"):
        # an error would be of what is finite on both sides, which is not what it is judged by
        return Measure(ELEMENTS, None, floor)
    single = row.get("error_kind") == SINGLE_VALUE
    about = row.get("error_kind") == measures.SKETCH and bool(row.get("error_uncertainty"))
    plain = Measure(SINGLE_VALUE if single else ELEMENTS, error, floor, about)
    if not isinstance(excess, float) or not isinstance(error, float) or not floor:
        return plain
    of_format = row.get("error_kind") == OTHER_FORMAT or row.get("other_format")
    if of_format and error <= floor:
        return Measure(OTHER_FORMAT, error, floor)
    if excess == float("inf") or excess <= 1.0 or error / floor >= _MOST * excess:
        return plain
    dense, norm, difference = (
        row.get("dense_error"), row.get("norm_benchmark"), row.get("norm_diff")
    )  # fmt: skip
    # repeats that are not exact raise both bounds, and lower both ratios
    if dense and dense / changes.dense_bound(row) >= _MOST * excess:
        return Measure(DENSE, dense, dense / excess)
    if norm and difference:
        size = abs(difference) / norm
        return Measure(NORM, size, size / excess)
    return plain
