"""Numbers rounded to a shorter format.

A rounding is unbiased, makes an error of one size, and leaves numbers of the format: statistics
show the largest and smallest of them, tensors all.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator

import numpy as np

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.differences import (
    Array,
    Parameters,
    Probabilities,
    Record,
    Tensors,
    Tokens,
)
from rlprobe.diagnose.cause.hypotheses import factor
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge import digits
from rlprobe.judge import origin as kinds
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.row import Row, each, number
from rlprobe.said import Said, say

#: Relative L2 error of rounding once to a format with unit round-off u: errors are uniform within
#: half a unit of the last place, and significands are spread over an octave.
_ONCE = 0.42
#: Error over that of a single rounding, of several in a row at most.
_SEVERAL = (0.5, 2.5)
#: Shares of the error that norm and mean may move by.
_BIAS, _SHIFT = 0.15, 0.3
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
#: Bits of an fp32 number that are 0 in a number of the format.
_ZEROS = {"bfloat16": 16, "float16 or TF32": 13}
_FP32 = 3.4028234663852886e38


def like(row: Row) -> str | None:
    """The format that one rounding to would make as large an error; None where it is biased."""
    found = measure.of(row)
    if found.factor is None or found.error <= 0 or not found.exact:
        return None
    bias, offset = abs(found.factor - 1.0), abs(found.offset or 0.0)
    if bias >= _BIAS * found.error or offset >= _SHIFT * found.error:
        return None
    own = UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    for name, unit in _COARSER.items():
        often = found.error / (_ONCE * unit)
        if unit > own and _SEVERAL[0] < often < _SEVERAL[1] and _extremes_round(row, unit):
            return name
    return None


def rounded_to(row: Row) -> str | None:
    """The format that a row's target was rounded to; None where nothing shows one."""
    name = like(row)
    return name if name is not None and _of_format(row, name) else None


def _said(error: float, name: str) -> Said:
    return say(
        "the target's largest and smallest numbers are {rounded_to} numbers, the "
        "benchmark's are not both, and the unbiased error of {error:.2g} is what a "
        "rounding to {rounded_to} makes",
        rounded_to=name,
        error=error,
    )


class OfRecord:
    """One rounding explains a record in every micro-batch."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Recognise the format; None where there is none, or several."""
        names = {rounded_to(row) for row in difference.every}
        name = names.pop() if len(names) == 1 else None
        if name is None:
            return None
        error = measure.of(difference.row).error
        return Fit("rounding_order", (_said(error, name),), choices=1)


class OfProbabilities:
    """Attention probabilities that are rounded."""

    needs = Probabilities

    def fit(self, difference: Probabilities) -> Fit | None:
        """As of a record."""
        name = rounded_to(difference.row)
        if name is None:
            return None
        said = say(
            "attention probabilities: {own}", own=_said(measure.of(difference.row).error, name)
        )
        return Fit("rounding_order", (said,), choices=1)


class OfParameters:
    """All gradients that differ are rounded to one format."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """Recognise the format in each; one gradient alone is a record."""
        if difference.kind in (kinds.CLIPPING, kinds.WEIGHT_GRADIENT):
            return None
        rows = each(difference.rows)
        names = {rounded_to(row) for row in rows}
        name = names.pop() if len(names) == 1 else None
        if name is None or len(rows) < 2:
            return None
        error = measure.of(rows[0]).error
        said = say(
            "all {count} gradients that differ are rounded to {formats}: in each",
            count=len(rows),
            formats=name,
        )
        return Fit(
            "rounding_order",
            (say("{said}, {rounding}", said=said, rounding=_said(error, name)),),
            choices=1,
        )


class OfTokens:
    """All of a result's numbers are of a shorter format, and no further off than it rounds."""

    needs = Tokens
    #: Round-offs of the format that what is made of rounded numbers may be off by.
    _MADE = 8.0

    def fit(self, difference: Tokens) -> Fit | None:
        """Count the bits of both sides' numbers."""
        sides = [[pair[side] for pair in difference.values] for side in (0, 1)]
        name = digits.shorter(sides[0], sides[1])
        if name is None:
            return None
        b, t = (np.concatenate(side) for side in sides)
        known = np.isfinite(b) & np.isfinite(t)
        size = float(np.linalg.norm(b[known]))
        error = float(np.linalg.norm(t[known] - b[known])) / size if size else math.inf
        allowed = self._MADE * 2.0 ** -digits.FORMATS[name] + difference.floor
        said = say(
            "all {count:,} numbers of {name} are {format} numbers on the target, and not on the "
            "benchmark; they differ by {error:.2g}, a rounding to it by up to {unit:.2g} each",
            count=t.size,
            name=difference.name,
            format=name,
            error=error,
            unit=2.0 ** -digits.FORMATS[name],
        )
        return Fit("rounding_order", (said,), error / allowed, choices=1)


class OfTensors:
    """Every element is the benchmark's, rounded."""

    needs = Tensors
    #: Values of a shorter format are numbers of a longer one as well.
    _MOSTLY = 0.5

    def fit(self, difference: Tensors) -> Fit | None:
        """The coarsest format that explains every element."""
        b, t = difference.benchmark, difference.target
        square = float(np.sum(difference.difference**2))
        for (name, of_b), (_, of_t) in zip(coarse(b), coarse(t), strict=True):
            if not square or np.mean(of_b == b) > self._MOSTLY:
                continue  # the benchmark's own format
            same = float(np.mean(of_b == t))
            if np.array_equal(of_t, t) and same > self._MOSTLY:
                said = say(
                    "every element of the target is a {name} number, and {share:.1%} are the "
                    "benchmark's element rounded to {name}",
                    name=name,
                    share=same,
                )
                return Fit("rounding_order", (said,), choices=1)
            share = float(np.sum((t - of_b) ** 2)) / square
            residual = factor.tensor_residual(difference, difference.left(of_b), share)
            if residual <= 1.0:
                said = say(
                    "rounding the benchmark's elements to {name} explains {share:.2%} of the "
                    "difference",
                    name=name,
                    share=1 - share,
                )
                return Fit("rounding_order", (said,), residual, choices=1, left=share)
        return None


def coarse(x: Array) -> Iterator[tuple[str, Array]]:
    """The values in each coarser format, by name."""
    single = x.astype(np.float32)
    bits = single.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    yield "bfloat16", kept.view(np.float32).astype(np.float64)
    with np.errstate(over="ignore"):
        yield "float16", single.astype(np.float16).astype(np.float64)


def _of_format(row: Row, name: str) -> bool:
    """Whether the target's extremes are numbers of a format and the benchmark's are not both.

    Two numbers that merely happen to be are one case in a hundred million.
    """
    zeros = _ZEROS.get(name)
    ends = [
        [number(row, f"{n}_{side}") for n in ("max", "min")] for side in ("benchmark", "target")
    ]
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


def _extremes_round(row: Row, unit: float) -> bool:
    """Whether the extremes moved as numbers do that are rounded to a unit.

    A rounding moves every element that is no number of the format already, the extremes too; what
    changes some elements only may leave both as they were.
    """
    moved = []
    for name in ("max", "min"):
        b, t = number(row, f"{name}_benchmark"), number(row, f"{name}_target")
        if b is None or t is None or not b or not (math.isfinite(b) and math.isfinite(t)):
            continue
        if not float(math.frexp(b)[0] / unit).is_integer():
            moved.append(abs(t - b) / abs(b) / unit)
    if len(moved) < 2:
        return True
    return bool(max(moved) > _UNMOVED and min(moved) < _FAR)
