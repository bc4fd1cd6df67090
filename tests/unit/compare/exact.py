"""Comparing two records the slow and obvious way: elements as fractions, nothing rounded.

Everything is derived from what a column means (docs/compare.md) and from the formats' own
definitions; nothing of rlprobe is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

#: A finite value, or what is not finite: "nan", "inf", "-inf".
Value = Fraction | str

#: Bytes an element, exponent bits, mantissa bits, bias, and how the format spells what is not
#: finite: as IEEE 754 does, by one code ("fn"), by the code of minus zero ("fnuz"), not at all.
FLOATS: dict[str, tuple[int, int, int, int, str]] = {
    "float64": (8, 11, 52, 1023, "ieee"),
    "float32": (4, 8, 23, 127, "ieee"),
    "float16": (2, 5, 10, 15, "ieee"),
    "bfloat16": (2, 8, 7, 127, "ieee"),
    "float8_e5m2": (1, 5, 2, 15, "ieee"),
    "float8_e4m3fn": (1, 4, 3, 7, "fn"),
    "float8_e4m3fnuz": (1, 4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (1, 5, 2, 16, "fnuz"),
}
INTEGERS = {
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4,
    "uint64": 8, "bool": 1,
}  # fmt: skip
COMPLEX = {"complex64": "float32", "complex128": "float64"}
E8M0, FP4 = "float8_e8m0fnu", "float4_e2m1fn_x2"
SIZES = {
    **{name: layout[0] for name, layout in FLOATS.items()},
    **INTEGERS, E8M0: 1, FP4: 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
SMALLEST, LARGEST = 5e-324, 1.7976931348623157e308


def decoded(code: int, dtype: str) -> tuple[Value, int]:
    """A float's value, and its place among all values of its format (both zeros are one)."""
    size, exponent_bits, mantissa_bits, bias, style = FLOATS[dtype]
    sign = -1 if code >> (size * 8 - 1) else 1
    magnitude = code & ((1 << (size * 8 - 1)) - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    place = sign * magnitude
    if style == "ieee" and exponent == (1 << exponent_bits) - 1:
        return ("nan" if mantissa else "inf" if sign > 0 else "-inf"), place
    if style == "fn" and magnitude == (1 << (size * 8 - 1)) - 1:
        return "nan", place
    if style == "fnuz" and sign < 0 and magnitude == 0:
        return "nan", place
    if exponent == 0:
        return sign * Fraction(mantissa) * Fraction(2) ** (1 - bias - mantissa_bits), place
    whole = mantissa + (1 << mantissa_bits)
    return sign * Fraction(whole) * Fraction(2) ** (exponent - bias - mantissa_bits), place


_E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def elements(raw: bytes, dtype: str) -> tuple[list[list[Value]], list[list[int]] | None]:
    """Numbers of every element, and their places among the values of the type."""
    size = SIZES[dtype]
    codes = [raw[at : at + size] for at in range(0, len(raw), size)]
    if dtype in COMPLEX:
        part, half = COMPLEX[dtype], size // 2
        return [
            [decoded(int.from_bytes(c, "little"), part)[0] for c in (code[:half], code[half:])]
            for code in codes
        ], None
    if dtype in INTEGERS:
        signed = dtype.startswith("int")
        whole = [int.from_bytes(code, "little", signed=signed) for code in codes]
        return [[Fraction(n)] for n in whole], [[n] for n in whole]
    if dtype == E8M0:
        return [
            ["nan"] if code[0] == 255 else [Fraction(2) ** (code[0] - 127)] for code in codes
        ], [[code[0]] for code in codes]
    if dtype == FP4:
        nibbles = [[code[0] & 15, code[0] >> 4] for code in codes]
        places = [[(n & 7) * (-1 if n & 8 else 1) for n in pair] for pair in nibbles]
        return [[_E2M1[abs(p)] * (-1 if p < 0 else 1) for p in pair] for pair in places], places
    pairs = [decoded(int.from_bytes(code, "little"), dtype) for code in codes]
    return [[value] for value, _ in pairs], [[place] for _, place in pairs]


@dataclass(frozen=True)
class Truth:
    """What all elements of both sides say."""

    identical: bool
    #: None where something is not finite on one side, or not in the same way.
    error: float | None
    euclidean: float
    cosine: float | None
    max_abs_err: float
    #: Indices at which it is reached.
    where: frozenset[int]
    ulp_max: float | None
    #: "benchmark", "target", "both", or None where everything is finite.
    nonfinite: str | None
    max_rel_err: float
    within_1e3: float
    within_5e3: float


def root(square: Fraction, exponent: int = 0) -> float:
    """``sqrt(square)``, correctly rounded or nearly so; infinite where no float64 holds it."""
    if square == 0:
        return 0.0
    shift = max(0, 260 - square.numerator.bit_length() + square.denominator.bit_length())
    shift += shift % 2
    whole = math.isqrt((square.numerator << shift) // square.denominator)
    return as_float(Fraction(whole, 1 << (shift // 2)))


def as_float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def compared(raw_b: bytes, raw_t: bytes, dtype_b: str, dtype_t: str) -> Truth:
    """Two tensors of as many elements; of two types only where both are real."""
    b, places_b = elements(raw_b, dtype_b)
    t, places_t = elements(raw_t, dtype_t)
    good, bad_b, bad_t, unlike = [], 0, 0, 0
    for n, (x, y) in enumerate(zip(b, t, strict=True)):
        if dtype_b == FP4:
            good.append(n)
            continue
        off = [any(isinstance(v, str) for v in side) for side in (x, y)]
        bad_b, bad_t = bad_b + off[0], bad_t + off[1]
        if not any(off):
            good.append(n)
        elif not (all(off) and _alike(x, y)):
            unlike += 1
    dot = bb = tt = dd = Fraction(0)
    largest = Fraction(0)
    squares: list[Fraction] = []
    for n in good:
        own = Fraction(0)
        for p, q in zip(b[n], t[n], strict=True):
            one, two = Fraction(p), Fraction(q)
            dot, bb, tt = dot + one * two, bb + one * one, tt + two * two
            # of two packed numbers the larger difference counts, of a complex one the modulus
            square = (two - one) ** 2
            own = max(own, square) if dtype_b == FP4 else own + square
            dd += square
        squares.append(own)
        largest = max(largest, own)
    scale = bb or tt
    error = min(max(root(dd / scale), SMALLEST), LARGEST) if dd else 0.0
    cosine = None
    if bb and tt:
        cosine = root(dot * dot / (bb * tt)) * (1 if dot > 0 else -1)
    elif bb == tt:
        cosine = 1.0
    both = bad_b and bad_t
    relative, near, nearer = _relative(b, t, set(good), unlike, dtype_b, dtype_t)
    same_type = dtype_b == dtype_t
    ulp = None
    if same_type and places_b is not None and places_t is not None:
        ulp = max(
            (abs(p - q) for n in good for p, q in zip(places_b[n], places_t[n], strict=True)),
            default=0,
        )
    return Truth(
        identical=same_type and raw_b == raw_t,
        error=None if unlike else error,
        euclidean=root(dd),
        cosine=cosine,
        max_abs_err=root(largest),
        where=frozenset(
            n for n, own in zip(good, squares, strict=True)
            if largest and root(own) >= root(largest) * (1 - 1e-15)
        ),
        ulp_max=None if ulp is None else float(ulp),
        nonfinite="both" if both else "benchmark" if bad_b else "target" if bad_t else None,
        max_rel_err=relative,
        within_1e3=near,
        within_5e3=nearer,
    )  # fmt: skip


def _alike(x: Sequence[Value], y: Sequence[Value]) -> bool:
    return all(p == q for p, q in zip(x, y, strict=True))


def _relative(
    b: list[list[Value]], t: list[list[Value]], good: set[int], unlike: int, one: str, other: str
) -> tuple[float, float, float]:
    """Largest ``|t - b| / |b|`` and the shares below 1e-3 and 5e-3, in msprobe's arithmetic.

    In float32 where both types fit it, else in float64; a zero benchmark is epsilon, added to both
    sides; what is not finite in the same way counts as equal.
    """
    narrow = all(
        name in (E8M0, FP4) or (name in FLOATS and FLOATS[name][0] <= 4) for name in (one, other)
    )
    kind = np.float32 if narrow else np.float64
    eps = kind(np.finfo(kind).eps)
    largest, near, nearer, count = 0.0, 0, 0, 0
    with np.errstate(all="ignore"):
        for n, (xs, ys) in enumerate(zip(b, t, strict=True)):
            if one in COMPLEX:
                ratio = _complex_ratio(xs, ys) if n in good else kind(0)
                ratios = [ratio]
            elif n in good:
                ratios = []
                for p, q in zip(xs, ys, strict=True):
                    x, y = kind(as_float(Fraction(p))), kind(as_float(Fraction(q)))
                    e = eps if x == 0 else kind(0)
                    ratio = abs(((y + e) - (x + e)) / (x + e))
                    share = abs((Fraction(q) - Fraction(p)) / Fraction(p)) if Fraction(p) else None
                    if not narrow and np.isinf(ratio) and share is not None and share < LARGEST:
                        ratio = kind(as_float(share))  # the difference overflowed, its share not
                    ratios.append(ratio)
            else:
                ratios = [kind(0)] * len(xs)
            for ratio in ratios:
                count += 1
                largest = max(largest, float(ratio))
                near += bool(ratio < kind(0.001))
                nearer += bool(ratio < kind(0.005))
    if not count:
        return 0.0, 1.0, 1.0
    return largest, (near - unlike) / count, (nearer - unlike) / count


def _complex_ratio(x: list[Value], y: list[Value]) -> float:
    own = sum((Fraction(v) ** 2 for v in x), Fraction(0)) or Fraction(2) ** -104
    return min(root(sum(((Fraction(q) - Fraction(p)) ** 2 for p, q in zip(x, y, strict=True)),
                        Fraction(0)) / own), LARGEST)  # fmt: skip


def float32s(raw: bytes) -> list[Fraction]:
    return [Fraction(value) for (value,) in struct.iter_unpack("<f", raw)]


def scalar(b: object, t: object) -> tuple[float | None, float | None]:
    """Difference and relative error of two Python scalars; error of unlike texts is 1."""
    numbers = (int, float, bool)
    if not (isinstance(b, numbers) and isinstance(t, numbers)):
        return None, 0.0 if b == t else 1.0
    if any(isinstance(v, float) and not math.isfinite(v) for v in (b, t)):
        return None, None
    x, y = Fraction(b), Fraction(t)
    if x == y:
        return 0.0, 0.0
    error = as_float(abs(y - x) / (abs(x) or abs(y)))
    return as_float(y - x), min(max(error, SMALLEST), LARGEST)
