"""Whether one side is the other's, cut off at a value.

With d = b - t of a record cut at c from above, d is nowhere negative, and wherever it is not 0 the
target is c. So the sum of d (t - c) is 0, and both its parts follow from statistics: the sum of d t
is (||b||^2 - ||t||^2 - ||b - t||^2) / 2, the sum of d the number of elements times the difference
of the means. A smooth change that happens to leave one extreme alone obeys nothing of the kind.
From below likewise, with all signs turned.
"""

from __future__ import annotations

import math
from typing import Any

from rlprobe.judge.roundoff import UNIT

#: An extreme that moved by less than this, relative to the record's largest, is where it was.
_LAST_BITS = 2e-6
#: Least sum of the differences over what elements cut at most by the extreme's own cut make of it:
#: 1 but for the uncertainty of the error.
_ONE_SIDED = 0.6


def said(row: dict[str, Any]) -> str | None:
    """What is cut where; None where nothing is.

    Args:
        row: a record whose inputs agree.
    """
    for cut in ("target", "benchmark"):
        whole = "benchmark" if cut == "target" else "target"
        ends = _ends(row, whole, cut)
        if ends is None:
            continue
        up, down = ends
        if up and down:
            low, high = row[f"min_{cut}"], row[f"max_{cut}"]
            if not _mirrored(low, high) or _mirrored(row[f"min_{whole}"], row[f"max_{whole}"]):
                continue
            return (
                f"the {cut}'s elements end at {low:.6g} and {high:.6g}, those of the {whole} at "
                f"{row[f'min_{whole}']:.6g} and {row[f'max_{whole}']:.6g}: it is clipped on both "
                "sides"
            )
        name, kept = ("max", "min") if up else ("min", "max")
        if (up or down) and _cut_at(row, whole, cut, name):
            return (
                f"the {cut}'s {name}imum is {row[f'{name}_{cut}']:.6g} where the {whole}'s is "
                f"{row[f'{name}_{whole}']:.6g}, its {kept}imum is as before, and all that differs "
                "lies at that value: it is clipped there"
            )
    return None


def _mirrored(low: float, high: float) -> bool:
    return high > 0 and math.isclose(-low, high, rel_tol=_LAST_BITS)


def _ends(row: dict[str, Any], whole: str, cut: str) -> tuple[bool, bool] | None:
    """Whether maximum and minimum of one side lie inside the other's; None where one is outside."""
    unit = UNIT.get(str(row.get("dtype_benchmark")))
    known = _numbers(row, [f"{name}_{side}" for name in ("max", "min") for side in (whole, cut)])
    if unit is None or known is None:
        return None
    largest = max(map(abs, known))
    # an extreme agrees as everything that agrees does: within round-off, which the floor bounds
    least = max(_LAST_BITS, 2.0 * unit, float(row.get("floor") or 0.0)) * largest
    top, bottom = known[0] - known[1], known[3] - known[2]
    if min(top, bottom) < -least:
        return None
    return top > least, bottom > least


def _numbers(row: dict[str, Any], names: list[str]) -> list[float] | None:
    """Finite numbers of a row; None where one is missing."""
    found = [float(row[name]) for name in names if isinstance(row.get(name), float)]
    return found if len(found) == len(names) and all(map(math.isfinite, found)) else None


def _cut_at(row: dict[str, Any], whole: str, cut: str, name: str) -> bool:
    """Whether all that differs lies at the cut side's extreme."""
    shape, kind = row.get("shape_benchmark"), row.get("error_kind")
    names = [f"norm_{whole}", f"norm_{cut}", f"mean_{whole}", f"mean_{cut}", "norm_benchmark"]
    known = _numbers(row, [*names, f"{name}_{cut}", f"{name}_{whole}", "error"])
    if not shape or known is None or kind not in ("tensor", "sketch"):
        return False
    before, after, mean, mean_cut, base, value, extreme, error = known
    count = float(math.prod(shape))
    total = count * (mean - mean_cut)
    square = (error * base) ** 2
    least = square / (extreme - value)  # of the same sign: negative where the minimum is cut
    if total * math.copysign(1.0, least) < _ONE_SIDED * abs(least):
        return False
    along = (before**2 - after**2 - square) / 2.0
    uncertain = 2.0 * float(row.get("error_uncertainty") or 0.0) * square
    unit = UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    stored = 2.0 * unit * (before**2 + abs(value) * count * max(abs(mean), abs(mean_cut)))
    allowed = 0.1 * abs(value * total) + uncertain + stored
    # where statistics resolve less than the difference's own square they say nothing of it
    return stored < 0.5 * square and abs(along - value * total) <= allowed
