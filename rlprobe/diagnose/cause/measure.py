"""What a record's difference looks like, in numbers and words, whatever caused it.

With t the target's tensor and b the benchmark's: e = ||t - b|| / ||b||, f = ||t|| / ||b||, and the
difference of the means over the root of the mean square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlprobe.judge.row import Row
from rlprobe.said import Said, exactly, say

#: Kinds of error that are of elements, and no bound from norms.
EXACT = ("tensor", "sketch")


@dataclass(frozen=True)
class Measure:
    """A record's difference."""

    error: float
    #: ||target|| / ||benchmark||, with a minus where the target is turned around; None where a norm
    #: is unknown or zero.
    factor: float | None
    #: Difference of the means over the root of the mean square; None where unknown.
    offset: float | None
    #: The error is one of elements.
    exact: bool


def of(row: Row) -> Measure:
    """The measures of a row."""
    b, t = row.get("norm_benchmark"), row.get("norm_target")
    factor = t / b if b and t is not None and math.isfinite(b) and math.isfinite(t) else None
    error = float(row.get("error") or 0.0)
    exact = row.get("error_kind") in EXACT
    if factor is not None and exact and _is_turned(row, error, factor):
        factor = -factor
    return Measure(error, factor, _offset(row), exact)


#: Most that a multiple that is turned around leaves, relative to the smaller of the difference and
#: of what remains.
_LEFT = 0.1


def _is_turned(row: Row, error: float, factor: float) -> bool:
    """Whether the target points the other way: e**2 > 1 + f**2, and nothing but a multiple is left.

    An error that is known to 9 % leaves the sign of small multiples open.
    """
    uncertainty = 2.0 * float(row.get("error_uncertainty") or 0.0)
    known = row.get("residual")
    straight = known is not None and known <= _LEFT * min(error, factor)
    return straight and error > math.hypot(1.0, factor) * (1.0 + uncertainty)


def _offset(row: Row) -> float | None:
    norm, difference = row.get("norm_benchmark"), row.get("mean_diff")
    shape = row.get("shape_benchmark")
    if not norm or difference is None or not shape:
        return None
    size = math.prod(shape)
    return float(difference) * math.sqrt(size) / norm if size else None


def sizes(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Smallest and largest ratio of norms over micro-batches; None where there is but one."""
    known = [abs(factor) for row in rows if (factor := of(row).factor) is not None]
    return (min(known), max(known)) if len(known) > 1 else None


def times(factor: float) -> Said:
    """A factor in words, with its digits where it is next to 1."""
    off = factor - 1.0
    if not 0 < abs(off) < 1e-3:
        return exactly(f"{factor:.6g}")
    return exactly(f"{factor:.8g} (1 {'+' if off > 0 else '-'} {abs(off):.2g})")


def about(factor: float, share: float) -> Said:
    """A factor with the digits that are known of it.

    Args:
        factor: as fitted.
        share: of its effect, its distance from 1, that what it was fitted to is spread by.
    """
    known = share * abs(factor - 1.0)
    digits = max(0, -math.floor(math.log10(known))) if known > 0 else 6
    return exactly(f"{factor:.{digits}f}" if digits <= 12 else f"{factor:.6g}")


def said(measure: Measure) -> list[Said]:
    """A difference in words."""
    found = [say("an error of {error:.2g}", error=measure.error)]
    if measure.factor is not None:
        found[0] += say(
            "; the norm is {factor} times the benchmark's", factor=times(abs(measure.factor))
        )
    if measure.offset is not None and abs(measure.offset) > 0.5 * measure.error:
        found.append(
            say("the mean is off by {offset:.2g} of the root mean square", offset=measure.offset)
        )
    return found


def lacks(row: Row) -> bool:
    """Whether the target is the benchmark's with some elements set to 0.

    What is left out stands at right angles to what is left: f^2 + e^2 = 1, which neither a factor
    (f = 1 - e) nor anything added (f >= 1) obeys. And what is left is as it was, so that an extreme
    stays unless it was left out. The error of a sketch is 9 % uncertain, its square 18 %.
    """
    measure = of(row)
    if measure.factor is None or not 0.02 < measure.error < 0.8:
        return False
    kept = [
        isinstance(b, float) and isinstance(t, float) and abs(t - b) <= 1e-4 * abs(b)
        for b, t in ((row.get(f"{n}_benchmark"), row.get(f"{n}_target")) for n in ("max", "min"))
    ]
    return any(kept) and 0.6 < (1.0 - measure.factor**2) / measure.error**2 < 1.6
