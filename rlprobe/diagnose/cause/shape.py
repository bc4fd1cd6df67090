"""What a difference looks like: a factor, a permutation, rounding, or none of these.

From one record: with t the target's tensor and b the benchmark's, e = ||t - b|| / ||b|| and
f = ||t|| / ||b||. Rounding is unbiased: |f - 1| is far below e. A pure factor has e = |f - 1|. And
moved elements leave all four statistics alone while e is of order one.

e = |f - 1| alone says little where f is far from 1: with f = 0.16 and e = 0.89, t may well stand at
45 degrees to b. So a factor is judged by what the best multiple of b leaves of t, relative to the
smaller of what changed and what remains: e**2 = 1 + f**2 - 2 f cos gives it where the error is of
whole tensors, both sides' sketches where they are known (:mod:`rlprobe.judge.multiples`).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from rlprobe.judge.roundoff import UNIT

#: Relative L2 error of rounding once to a format with unit round-off u: errors are uniform within
#: half a unit of the last place, and significands are spread over an octave.
_ONCE = 0.42
#: What a multiple may leave, relative to the smaller of the difference and of what remains: where
#: sketches say, and where error and norms do.
_LEFT, _LEFT_BY_NORMS = 0.1, 0.2
#: And as a share of the floor, which is four standard deviations of round-off.
_NOISE = 1.0 / 3.0
#: Error over that of a single rounding, of several in a row at most.
_SEVERAL = (0.5, 2.5)
#: Difference of the means, over the root of the mean square, of numbers that moved about.
_SUM = 1e-5
#: An extreme that is rounded moves by less than this share of the unit once in fifty times.
_UNMOVED = 1 / 64
#: And by more than this many units never.
_FAR = 8.0
#: Formats that a device may round to without being told.
_COARSER = {
    "bfloat16": UNIT["torch.bfloat16"],
    "float16 or TF32": UNIT["torch.float16"],
    "float8": UNIT["torch.float8_e4m3fn"],
}


@dataclass(frozen=True)
class Shape:
    """A record's difference."""

    error: float
    #: ||target|| / ||benchmark||, with a minus where the target is turned around; None where a norm
    #: is unknown or zero.
    factor: float | None
    #: The difference is a multiplication by ``factor`` within the uncertainty of the error.
    scaled: bool
    #: Same statistics, other places.
    permuted: bool
    #: Format that the target was rounded to: the error is what that makes, and its extremes are
    #: numbers of the format. None where none is.
    rounded_to: str | None
    #: Format that one rounding to would make as large an error; nothing else speaks for it.
    like_rounding: str | None
    #: Difference of the means over the root of the mean square.
    offset: float | None

    def said_rounding(self) -> str:
        """Evidence of a rounding to another format."""
        return (
            f"the target's largest and smallest numbers are {self.rounded_to} numbers, the "
            f"benchmark's are not both, and the unbiased error of {self.error:.2g} is what a "
            f"rounding to {self.rounded_to} makes"
        )


def of(row: dict[str, Any]) -> Shape:
    """The shape of a row's difference."""
    error = float(row.get("error") or 0.0)
    b, t = row.get("norm_benchmark"), row.get("norm_target")
    factor = t / b if b and t is not None and math.isfinite(b) and math.isfinite(t) else None
    uncertainty = 2.0 * float(row.get("error_uncertainty") or 0.0)
    exact = row.get("error_kind") in ("tensor", "sketch")
    scaled = permuted = False
    rounded_to = like = None
    if factor is not None and error > 0:
        if exact and _is_turned(row, error, factor):
            factor = -factor
        bias = abs(factor - 1.0)
        scaled = exact and bias > 0 and _leaves_nothing(row, error, factor, uncertainty)
        scaled = scaled and _extremes_scale(row, factor)
        permuted = exact and error > 0.3 and _same_statistics(row)
        offset = abs(_offset(row) or 0.0)
        if exact and not scaled and bias < 0.15 * error and offset < 0.3 * error:
            like = _rounding(error, row)
            rounded_to = like if like is not None and _of_format(row, like) else None
    return Shape(error, factor, scaled, permuted, rounded_to, like, _offset(row))


def _is_turned(row: dict[str, Any], error: float, factor: float) -> bool:
    """Whether the target points the other way: e**2 > 1 + f**2, and nothing but a multiple is left.

    An error that is known to 9 % leaves the sign of small multiples open.
    """
    uncertainty = 2.0 * float(row.get("error_uncertainty") or 0.0)
    known = row.get("residual")
    straight = known is not None and known <= _LEFT * min(error, factor)
    return straight and error > math.hypot(1.0, factor) * (1.0 + uncertainty)


def _leaves_nothing(row: dict[str, Any], error: float, factor: float, uncertainty: float) -> bool:
    """Whether the best multiple of the benchmark leaves no more of the target than round-off."""
    noise = _NOISE * float(row.get("floor") or 0.0)
    known = row.get("residual")
    if known is not None:
        return bool(known <= math.hypot(_LEFT * min(error, abs(factor)), noise))
    # ||t - b|| >= | ||t|| - ||b|| |, with equality for multiples; sketches are 9 % uncertain.
    low = error / (1.0 + uncertainty)
    lacks_cos = max(low**2 - (factor - 1.0) ** 2, 0.0) / (2.0 * factor) if factor else 1.0
    left = factor * math.sqrt(lacks_cos * max(2.0 - lacks_cos, 0.0))
    return left <= math.hypot(_LEFT_BY_NORMS * min(low, factor), noise) and lacks_cos < 1.0


def _extremes_scale(row: dict[str, Any], factor: float) -> bool:
    """Whether the extremes differ by the same factor, within a fifth of it and round-off.

    A fifth of the difference, or of what remains where that is less.
    """
    rounding = 2.0 * UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    allowed = 0.2 * min(abs(factor - 1.0), abs(factor)) + 2e-6 + rounding
    for name, other in (("max", "min"), ("min", "max")):
        # what is turned around has its largest where the other has its smallest
        b, t = row.get(f"{name if factor > 0 else other}_benchmark"), row.get(f"{name}_target")
        if b is None or t is None:
            continue
        if not abs(t - factor * b) <= allowed * abs(b):
            return False
    return True


def times(factor: float) -> str:
    """A factor in words, with its digits where it is next to 1."""
    off = factor - 1.0
    if not 0 < abs(off) < 1e-3:
        return f"{factor:.6g}"
    return f"{factor:.8g} (1 {'+' if off > 0 else '-'} {abs(off):.2g})"


def _same_statistics(row: dict[str, Any]) -> bool:
    norm = row.get("norm_benchmark")
    largest = max(abs(row.get("max_benchmark") or 0.0), abs(row.get("min_benchmark") or 0.0))
    if not norm or not largest:
        return False
    # what moves about keeps its sum, which what changes its sign does not
    offset = _offset(row)
    if offset is None or abs(offset) > _SUM:
        return False
    extremes = [abs(row.get(f"{name}_diff") or 0.0) / largest for name in ("max", "min")]
    return bool(max(extremes) < 1e-5 and abs(row.get("norm_diff") or 0.0) / norm < 1e-5)


def _rounding(error: float, row: dict[str, Any]) -> str | None:
    """The format that a rounding to makes as large an error."""
    own = UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    for name, unit in _COARSER.items():
        times = error / (_ONCE * unit)
        if unit > own and _SEVERAL[0] < times < _SEVERAL[1] and _extremes_round(row, unit):
            return name
    return None


#: Bits of an fp32 number that are 0 in a number of the format.
_FP32 = 3.4028234663852886e38
_ZEROS = {"bfloat16": 16, "float16 or TF32": 13}


def _of_format(row: dict[str, Any], name: str) -> bool:
    """Whether the target's extremes are numbers of a format and the benchmark's are not both.

    Two numbers that merely happen to be are one case in a hundred million.
    """
    zeros = _ZEROS.get(name)
    ends = [[row.get(f"{n}_{side}") for n in ("max", "min")] for side in ("benchmark", "target")]
    if zeros is None or any(not isinstance(x, float) for side in ends for x in side):
        return False
    benchmark, target = ([_is_short(float(x or 0.0), zeros) for x in side] for side in ends)
    nothing = all(x == 0 for x in ends[1])
    return all(target) and not all(benchmark) and not nothing


def _is_short(value: float, zeros: int) -> bool:
    if not abs(value) <= _FP32:
        return False
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return bool(bits & ((1 << zeros) - 1) == 0)


def _extremes_round(row: dict[str, Any], unit: float) -> bool:
    """Whether the extremes moved as numbers do that are rounded to a unit.

    A rounding moves every element that is no number of the format already, the extremes too; what
    changes some elements only may leave both as they were.
    """
    moved = []
    for name in ("max", "min"):
        b, t = row.get(f"{name}_benchmark"), row.get(f"{name}_target")
        if b is None or t is None or not b or not (math.isfinite(b) and math.isfinite(t)):
            continue
        if not float(math.frexp(b)[0] / unit).is_integer():
            moved.append(abs(t - b) / abs(b) / unit)
    if len(moved) < 2:
        return True
    return bool(max(moved) > _UNMOVED and min(moved) < _FAR)


def _offset(row: dict[str, Any]) -> float | None:
    norm, difference = row.get("norm_benchmark"), row.get("mean_diff")
    shape = row.get("shape_benchmark")
    if not norm or difference is None or not shape:
        return None
    size = math.prod(shape)
    return float(difference) * math.sqrt(size) / norm if size else None


def lacks(shape: Shape, row: dict[str, object]) -> bool:
    """Whether the target is the benchmark's with some elements set to 0.

    What is left out stands at right angles to what is left: f^2 + e^2 = 1, which neither a factor
    (f = 1 - e) nor anything added (f >= 1) obeys. And what is left is as it was, so that an extreme
    stays unless it was left out. The error of a sketch is 9 % uncertain, its square 18 %.
    """
    if shape.factor is None or not 0.02 < shape.error < 0.8:
        return False
    kept = [
        isinstance(b, float) and isinstance(t, float) and abs(t - b) <= 1e-4 * abs(b)
        for b, t in ((row.get(f"{n}_benchmark"), row.get(f"{n}_target")) for n in ("max", "min"))
    ]
    return any(kept) and 0.6 < (1.0 - shape.factor**2) / shape.error**2 < 1.6
