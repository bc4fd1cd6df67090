"""Numba kernels of the one-pass comparison: plain loops over blocks that stay in cache.

Each loop does one thing so that LLVM vectorises it; together they read every byte once from memory
and a few times from cache. Sums are float64 and may be reassociated; everything else is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlprobe.compiled import compiled
from rlprobe.imports import hidden

#: Elements per inner block: both inputs and two scratch rows fit the first-level cache.
INNER = 2048

_E32, _E64 = np.float32(np.finfo(np.float32).eps), np.finfo(np.float64).eps
#: The thresholds' bit patterns: non-negative floats are ordered as their bits are.
_LOW32_BITS, _HIGH32_BITS = np.float32(0.001).view(np.int32), np.float32(0.005).view(np.int32)
_LOW64_BITS, _HIGH64_BITS = np.float64(0.001).view(np.int64), np.float64(0.005).view(np.int64)


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _sums(b: Any, t: Any, total: Any) -> None:
    dot = bb = tt = dd = 0.0
    for i in range(b.size):
        x, y = np.float64(b[i]), np.float64(t[i])
        d = y - x
        dot += x * y
        bb += x * x
        tt += y * y
        dd += d * d
    total[0] += dot
    total[1] += bb
    total[2] += tt
    total[3] += dd


@compiled()
def _relative32(b: Any, t: Any, difference: Any, relative: Any) -> None:
    """|t - b| and |t - b| / |b| in float32, a zero benchmark counted as epsilon (msprobe)."""
    for i in range(b.size):
        x, y = b[i], t[i]
        e = _E32 if x == np.float32(0) else np.float32(0)
        difference[i] = abs(y - x)
        xe = x + e
        relative[i] = abs(((y + e) - xe) / xe)


@compiled()
def _relative64(b: Any, t: Any, difference: Any, relative: Any) -> None:
    for i in range(b.size):
        x, y = b[i], t[i]
        e = _E64 if x == 0.0 else 0.0
        difference[i] = abs(y - x)
        xe = x + e
        relative[i] = abs(((y + e) - xe) / xe)


@compiled()
def _count32(bits: Any, low: Any, high: Any) -> Any:
    """Elements below both thresholds and the maximum, over the bits of non-negative floats."""
    below_low = below_high = np.int32(0)
    top = np.int32(0)
    for i in range(bits.size):
        v = bits[i]
        below_low += np.int32(v < low)
        below_high += np.int32(v < high)
        top = max(top, v)
    return below_low, below_high, top


@compiled()
def _count64(bits: Any, low: Any, high: Any) -> Any:
    below_low = below_high = np.int64(0)
    top = np.int64(0)
    for i in range(bits.size):
        v = bits[i]
        below_low += np.int64(v < low)
        below_high += np.int64(v < high)
        top = max(top, v)
    return below_low, below_high, top


@compiled()
def _top(bits: Any, top: Any) -> Any:
    for i in range(bits.size):
        top = max(top, bits[i])
    return top


@compiled()
def _locate(b: Any, t: Any, start: int, state: Any, where: Any) -> None:
    """The exact largest difference of a block, and where it is first reached."""
    for i in range(b.size):
        d = abs(np.float64(t[i]) - np.float64(b[i]))
        if d > state[4] or (where[0] < 0 and d == d):
            state[4] = d
            where[0] = start + i


@compiled()
def block32(b: Any, t: Any, start: int, state: Any, where: Any, scratch: Any, bits: Any) -> None:
    """Add a float32 block; ``scratch`` and ``bits`` are one buffer of 2 rows seen as both types.

    ``state``: dot, |b|^2, |t|^2, |d|^2, max |d|, max relative. ``where``: index of max |d|,
    elements within 1e-3, within 5e-3.
    """
    for begin in range(0, b.size, INNER):
        end = min(begin + INNER, b.size)
        x, y = b[begin:end], t[begin:end]
        n = end - begin
        _sums(x, y, state)
        _relative32(x, y, scratch[0, :n], scratch[1, :n])
        low, high, top = _count32(bits[1, :n], _LOW32_BITS, _HIGH32_BITS)
        where[1] += low
        where[2] += high
        relative = np.float64(_as_float32(top, scratch, bits))
        state[5] = max(state[5], relative)
        # rounding to float32 keeps order, so the block holding the exact maximum is never missed
        largest = np.float64(_as_float32(_top(bits[0, :n], np.int32(0)), scratch, bits))
        if largest >= np.float64(np.float32(state[4])) or where[0] < 0:
            _locate(x, y, start + begin, state, where)


@compiled()
def block64(b: Any, t: Any, start: int, state: Any, where: Any, scratch: Any, bits: Any) -> None:
    """Add a float64 block; as :func:`block32`."""
    for begin in range(0, b.size, INNER):
        end = min(begin + INNER, b.size)
        x, y = b[begin:end], t[begin:end]
        n = end - begin
        _sums(x, y, state)
        _relative64(x, y, scratch[0, :n], scratch[1, :n])
        low, high, top = _count64(bits[1, :n], _LOW64_BITS, _HIGH64_BITS)
        where[1] += low
        where[2] += high
        bits[0, INNER] = top
        state[5] = max(state[5], scratch[0, INNER])
        bits[0, INNER] = _top(bits[0, :n], np.int64(0))
        if scratch[0, INNER] >= state[4] or where[0] < 0:
            _locate(x, y, start + begin, state, where)


@compiled()
def _as_float32(value: Any, scratch: Any, bits: Any) -> Any:
    bits[0, INNER] = value
    return scratch[0, INNER]


@compiled()
def steps_narrow(b: Any, t: Any) -> float:
    """Most representable values between two floats of up to 32 bits, given as signed bits."""
    mask = np.int64(1) << np.int64(b.itemsize * 8 - 1)
    largest = np.int64(0)
    for i in range(b.size):
        p, q = np.int64(b[i]), np.int64(t[i])
        # sign-magnitude to two's complement, so that -0.0 and 0.0 are the same step
        p = p if p >= 0 else -(p + mask)
        q = q if q >= 0 else -(q + mask)
        largest = max(largest, abs(p - q))
    return np.float64(largest)


@compiled()
def steps_float64(b: Any, t: Any) -> float:
    """The same for float64, given as signed bits."""
    low = np.int64(-(1 << 63))
    largest = 0.0
    for i in range(b.size):
        p, q = b[i], t[i]
        p = p if p >= 0 else -(p - low)
        q = q if q >= 0 else -(q - low)
        largest = max(largest, _gap(p, q))
    return largest


@compiled()
def steps_integer(b: Any, t: Any) -> float:
    """Largest difference of integers."""
    largest = 0.0
    for i in range(b.size):
        largest = max(largest, _gap(b[i], t[i]))
    return largest


@compiled()
def _gap(p: Any, q: Any) -> float:
    """|p - q| of integers, which need not fit the type; exact where a float64 can be."""
    if (p >= 0) == (q >= 0):
        return np.float64(p - q) if p > q else np.float64(q - p)
    return abs(np.float64(p) - np.float64(q))


# numba's first kernel of a process looks for SciPy's BLAS and for cffi, whose imports take as long
# as numba's own; no kernel here uses them.
with hidden("scipy.linalg", "cffi"):
    _top(np.zeros(1, np.int32), np.int32(0))
