"""Sums that neither overflow nor underflow, and differences of integers of any size.

Every element is taken as two float64 numbers, high and low, whose sum is exact: an integer of 64
bits has its lowest 11 bits in the low one. A first pass finds the largest magnitudes, a second one
sums squares scaled by them. Slow, and needed rarely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlprobe.compare.tensors.figures import Distance, cosine_of
from rlprobe.dumps.tensors.dtypes import Array, DType, numbers
from rlprobe.dumps.tensors.tensorfile import TensorFile

Floats = npt.NDArray[np.float64]
Pairs = Iterator[tuple[Array, Array]]

_SMALLEST, _LARGEST = 5e-324, 1.7976931348623157e308
_LOW_BITS = 0x7FF
_EPSILON = 2.0**-52


@dataclass(frozen=True)
class Exact:
    """Figures of two tensors, as :class:`.figures.Distance` has them."""

    euclidean: float
    error: float
    cosine: float | None
    max_abs_err: float
    max_abs_index: int | None
    max_rel_err: float


@dataclass
class Largest:
    """What the first pass finds, over elements that are finite on both sides."""

    benchmark: DType
    target: DType
    #: Largest magnitudes of b, t and t - b, as powers of two that none reaches.
    exponents: tuple[int, int, int]
    max_abs_err: float
    max_abs_index: int | None
    max_rel_err: float

    def finished(self, pairs: Pairs) -> Exact:
        """The second pass, over the same blocks."""
        sums = np.zeros(4)
        eb, et, ed = self.exponents
        for raw_b, raw_t in pairs:
            b, t, d, shift = _difference(raw_b, raw_t, self.benchmark, self.target)
            x, y = np.ldexp(b[0] + b[1], -eb), np.ldexp(t[0] + t[1], -et)
            d = np.ldexp(d, shift - ed)
            sums += [(x * y).sum(), (x * x).sum(), (y * y).sum(), (d * d).sum()]
        dot, bb, tt, dd = (float(s) for s in sums)
        scale, e = (bb, eb) if bb else (tt, et)
        error = 0.0
        if dd:
            error = _scaled(math.sqrt(dd / scale), ed - e) if scale else 0.0
            error = min(max(error, _SMALLEST), _LARGEST)
        cosine = cosine_of(dot, math.sqrt(bb), math.sqrt(tt)) if bb and tt else None
        if cosine is None and bb == tt:
            cosine = 1.0
        return Exact(
            _scaled(math.sqrt(dd), ed), error, cosine, self.max_abs_err, self.max_abs_index,
            self.max_rel_err,
        )  # fmt: skip


def sums(pairs: Pairs, benchmark: DType, target: DType) -> Largest:
    """The first pass."""
    top = [0.0, 0.0]
    largest, exponent, where, relative, start = 0.0, -5000, None, 0.0, 0
    each = benchmark.numbers
    for raw_b, raw_t in pairs:
        b, t, d, shift = _difference(raw_b, raw_t, benchmark, target)
        for side, (high, low) in enumerate((b, t)):
            top[side] = max(top[side], float(np.abs(high + low).max(initial=0.0)))
        with np.errstate(over="ignore"):
            magnitudes = np.abs(d) if benchmark.kind != "complex" else np.hypot(d[::2], d[1::2])
        if magnitudes.size and (most := float(magnitudes.max())) > 0:
            exponent = max(exponent, _exponent(float(np.abs(d).max())) + shift)
            with np.errstate(over="ignore"):
                found = _scaled(most, shift)
            if found > largest:
                largest = found
                where = start + int(magnitudes.argmax()) // (
                    1 if benchmark.kind == "complex" else each
                )
            relative = max(relative, _relative(b[0] + b[1], d, shift, benchmark))
        start += len(raw_b)
    exponents = (_exponent(top[0]), _exponent(top[1]), exponent)
    return Largest(benchmark, target, exponents, largest, where, relative)


def _relative(b: Floats, d: Floats, shift: int, dtype: DType) -> float:
    """Largest ``|d| / |b|``, a zero benchmark counted as epsilon."""
    ratio = np.nan_to_num(_ratios(b, d, dtype), posinf=_LARGEST)
    return _scaled(float(ratio.max(initial=0.0)), shift)


def _ratios(b: Floats, d: Floats, dtype: DType) -> Floats:
    """``|d| / |b|`` of every element; of complex ones, of moduli."""
    with np.errstate(all="ignore"):
        if dtype.kind != "complex":
            return np.abs(d) / np.where(b == 0, _EPSILON, np.abs(b))
        # a modulus may overflow, or lose its digits, where its parts do not
        most = np.maximum(np.abs(b), np.abs(d)).reshape(-1, 2).max(axis=1)
        room = np.where(most > 2.0**1000, 0.25, np.where(most < 2.0**-800, 2.0**200, 1.0))
        modulus_b, modulus_d = (np.hypot(x[0::2] * room, x[1::2] * room) for x in (b, d))
        ratio = modulus_d / np.where(modulus_b == 0, _EPSILON, modulus_b)
        found: Floats = np.where(modulus_b == 0, ratio / room, ratio)
        return found


def _difference(
    raw_b: Array, raw_t: Array, benchmark: DType, target: DType
) -> tuple[tuple[Floats, Floats | float], tuple[Floats, Floats | float], Floats, int]:
    """Both sides as high and low, and their difference over ``2 ** shift``; 0 where not finite."""
    b, t = _split(raw_b, benchmark), _split(raw_t, target)
    bad = ~(np.isfinite(b[0]) & np.isfinite(t[0]))
    if benchmark.kind == "complex":
        bad = np.repeat(bad.reshape(-1, 2).any(axis=1), 2)
    if bad.any():
        b, t = ((np.where(bad, 0.0, high), low) for high, low in (b, t))
    with np.errstate(over="ignore"):
        d = (t[0] - b[0]) + (t[1] - b[1])
    if np.isfinite(d).all():
        return b, t, d, 0
    return b, t, (t[0] / 2 - b[0] / 2) + (t[1] - b[1]) / 2, 1


def _split(raw: Array, dtype: DType) -> tuple[Floats, Floats | float]:
    if not dtype.large_integers:
        return np.asarray(numbers(raw, dtype, True), np.float64), 0.0
    whole: Any = raw
    low = whole & whole.dtype.type(_LOW_BITS)
    return (whole - low).astype(np.float64), low.astype(np.float64)


def _exponent(magnitude: float) -> int:
    return math.frexp(magnitude)[1]


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.inf


def of_complex(
    benchmark: TensorFile,
    target: TensorFile,
    pairs: Callable[[TensorFile, TensorFile], Pairs],
) -> Distance:
    """The distance of complex tensors: moduli of differences, an element one number."""
    exact = sums(pairs(benchmark, target), benchmark.dtype, target.dtype).finished(
        pairs(benchmark, target)
    )
    bad_b = bad_t = bad_same = near = nearer = 0
    for raw_b, raw_t in pairs(benchmark, target):
        with np.errstate(invalid="ignore"):  # as in numbers: signalling NaNs
            b, t = raw_b.astype(np.complex128), raw_t.astype(np.complex128)
        off_b, off_t = ~np.isfinite(b), ~np.isfinite(t)
        same = off_b & off_t & _alike(b.real, t.real) & _alike(b.imag, t.imag)
        bad_b, bad_t = bad_b + int(off_b.sum()), bad_t + int(off_t.sum())
        bad_same += int(same.sum())
        off = off_b | off_t
        x, _, d, shift = _difference(raw_b, raw_t, benchmark.dtype, target.dtype)
        ratio = np.ldexp(_ratios(x[0] + x[1], d, benchmark.dtype), shift)
        far = off & ~same
        near += int(((ratio < 1e-3) & ~far).sum())
        nearer += int(((ratio < 5e-3) & ~far).sum())
    size = benchmark.size
    return Distance(
        size=size,
        identical=False,
        euclidean=exact.euclidean,
        error=exact.error,
        cosine=exact.cosine,
        max_abs_err=exact.max_abs_err,
        max_abs_index=exact.max_abs_index,
        max_rel_err=exact.max_rel_err,
        ulp_max=None,
        within_1e3=near / size if size else 1.0,
        within_5e3=nearer / size if size else 1.0,
        saturated=0,
        nonfinite_benchmark=bad_b,
        nonfinite_target=bad_t,
        nonfinite_same=bad_same,
    )


def _alike(b: Array, t: Array) -> Any:
    return (b == t) | (np.isnan(b) & np.isnan(t))
