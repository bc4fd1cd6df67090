"""One side is the other's, cut off at a value, or at the largest number of a format.

With d = b - t of a record cut at c from above, d is nowhere negative, and wherever it is not 0 the
target is c. So the sum of d (t - c) is 0, and both its parts follow from statistics: the sum of d t
is (||b||^2 - ||t||^2 - ||b - t||^2) / 2, the sum of d the number of elements times the difference
of the means. A smooth change that happens to leave one extreme alone obeys nothing of the kind.
From below likewise, with all signs turned.
"""

from __future__ import annotations

import math

import numpy as np

from rlprobe.diagnose.cause.differences import Record, Tensors, Tokens
from rlprobe.diagnose.cause.hypotheses import subset
from rlprobe.diagnose.cause.hypotheses.factor import tensor_residual
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, Fit
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.row import Row, number
from rlprobe.said import Said, joined, of_side, say

#: Largest finite numbers; a device that saturates stops there instead of at infinity. Whatever a
#: record's own format is: a kernel may have computed in a smaller one.
_LARGEST = {
    448.0: "float8_e4m3",
    57344.0: "float8_e5m2",
    65504.0: "float16",
    3.3895313892515355e38: "bfloat16",
    3.4028234663852886e38: "float32",
}
#: An extreme that moved by less than this, relative to the record's largest, is where it was.
_LAST_BITS = 2e-6
#: Least sum of the differences over what elements cut at most by the extreme's own cut make of it:
#: 1 but for the uncertainty of the error.
_ONE_SIDED = 0.6


class AtLargest:
    """One side stops at the largest number of a format, the other goes on."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Look for it among the extremes; a mask is filled with such numbers on purpose."""
        row = difference.row
        sides = {
            side: max(abs(number(row, f"{name}_{side}") or 0.0) for name in ("max", "min"))
            for side in ("benchmark", "target")
        }
        stopped = [side for side, value in sides.items() if value in _LARGEST]
        if len(stopped) != 1 or is_mask(row):
            return None
        limit = sides[stopped[0]]
        other = sides["target" if stopped[0] == "benchmark" else "benchmark"]
        said = say(
            "the {stopped} stops at {limit:g}, the largest {largest}; the other side has {other:g}",
            stopped=of_side(stopped[0]),
            limit=limit,
            largest=_LARGEST[limit],
            other=other,
        )
        return Fit("saturation", (said,))


def is_mask(row: Row) -> bool:
    """Whether a record is a mask, as its argument is called."""
    return "mask" in str(row.get("index"))


class AtValue:
    """All that differs lies at one side's extreme."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Look for it in every micro-batch."""
        if not difference.inside or is_mask(difference.row):
            return None
        each = [said(row) for row in difference.every]
        first = said(difference.row)
        if first is None or any(found is None for found in each):
            return None
        return Fit("saturation", (first,), choices=1)


class AtBoth:
    """One side ends at a value and its negative: what is clipped does, and so does much else."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Say it; without elements there is no telling whether the others are as they were."""
        if not difference.inside or is_mask(difference.row):
            return None
        mirrored = said_of_both(difference.row)
        return None if mirrored is None else Fit(UNKNOWN, (mirrored,), choices=2)


class OfTokens:
    """Every token beyond a value is that value on the target, and every other as it was."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """The value that all tokens that differ share, as a bound of all."""
        found = subset.fit(difference.values)
        if found is None:
            return None
        b = np.concatenate([own for own, _ in difference.values])
        t = np.concatenate([other for _, other in difference.values])
        side = "below" if float(t.min()) >= found.value else "above"
        model = np.maximum(b, found.value) if side == "below" else np.minimum(b, found.value)
        square = float(np.sum((t - b) ** 2))
        share = float(np.sum((t - model) ** 2)) / square
        if found.differ < _FEW:
            return None
        said = say(
            "{name}: all {differ} of {tokens} tokens that are {side} {value:g} on the "
            "benchmark are {value:g} on the target, and the others as they were: it is "
            "clipped there",
            name=difference.name,
            differ=found.differ,
            tokens=found.tokens,
            side=say("below") if side == "below" else say("above"),
            value=found.value,
        )
        return Fit("saturation", (said,), share / _UNEXPLAINED, {"value": found.value})


#: Share of a difference's square that a cut of tokens leaves at most.
_UNEXPLAINED = 1e-3


class OfTensors:
    """Elements cut off at a value, from above, below or both."""

    needs = Tensors

    def fit(self, difference: Tensors) -> Fit | None:
        """The cut that the target's extremes name, put to the benchmark."""
        b, t = difference.benchmark, difference.target
        low, high = float(t.min()), float(t.max())
        if low <= float(b.min()) and high >= float(b.max()):
            return None
        square = float(np.sum(difference.difference**2))
        below, above = np.maximum(low - b, 0.0), np.maximum(b - high, 0.0)
        # an end that is another one by its last bits is no cut
        is_cut = [float(np.sum(off**2)) > _LAST * square for off in (below, above)]
        model = b + is_cut[0] * below - is_cut[1] * above
        cut = int(np.count_nonzero(model != b))
        if not square or cut < _FEW:
            return None
        share = float(np.sum((t - model) ** 2)) / square
        ends = [f"{end:.6g}" for end, held in zip((low, high), is_cut, strict=True) if held]
        said = say(
            "{cut} of {size} elements of the benchmark lie beyond {ends} and are cut "
            "off there on the target: that explains {share:.2%} of the difference",
            cut=cut,
            size=b.size,
            ends=joined(ends, say(" or ")),
            share=1 - share,
        )
        residual = tensor_residual(difference, difference.left(model), share)
        return Fit("saturation", (said,), residual, choices=len(ends), left=share)


#: Share of a difference's square below which an end's elements are no cut.
_LAST = 1e-6
#: Fewer elements at an extreme may be there by chance: any tensor has one.
_FEW = 3


_CALLED = {"max": say("maximum"), "min": say("minimum")}


def said(row: Row) -> Said | None:
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
        name, kept = ("max", "min") if up else ("min", "max")
        values = _numbers(row, [f"{name}_{cut}", f"{name}_{whole}"])
        if values is not None and up is not down and _cut_at(row, whole, cut, name):
            return say(
                "the {cut}'s {end} is {cut_at:.6g} where the {whole}'s is "
                "{value:.6g}, its {kept} is as before, and all that differs lies "
                "at that value: it is clipped there",
                cut=of_side(cut),
                end=_CALLED[name],
                cut_at=values[0],
                whole=of_side(whole),
                value=values[1],
                kept=_CALLED[kept],
            )
    return None


def said_of_both(row: Row) -> Said | None:
    """Where one side ends at a value and its negative, inside the other's ends."""
    for cut in ("target", "benchmark"):
        whole = "benchmark" if cut == "target" else "target"
        ends = _numbers(row, [f"{name}_{side}" for side in (cut, whole) for name in ("min", "max")])
        if ends is None or _ends(row, whole, cut) != (True, True):
            continue
        low, high, lowest, highest = ends
        if _mirrored(low, high) and not _mirrored(lowest, highest):
            return say(
                "the {cut}'s elements end at {low:.6g} and {high:.6g}, those of the "
                "{whole} at {lowest:.6g} and {highest:.6g}: as where it is clipped on "
                "both sides, or bounded otherwise",
                cut=of_side(cut),
                low=low,
                high=high,
                whole=of_side(whole),
                lowest=lowest,
                highest=highest,
            )
    return None


def _mirrored(low: float, high: float) -> bool:
    return high > 0 and math.isclose(-low, high, rel_tol=_LAST_BITS)


def _ends(row: Row, whole: str, cut: str) -> tuple[bool, bool] | None:
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


def _numbers(row: Row, names: list[str]) -> list[float] | None:
    """Finite numbers of a row; None where one is missing."""
    found = [value for name in names if (value := number(row, name)) is not None]
    return found if len(found) == len(names) and all(map(math.isfinite, found)) else None


def _cut_at(row: Row, whole: str, cut: str, name: str) -> bool:
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
