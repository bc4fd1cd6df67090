"""Whether what differs of a value went through a shorter format on one side.

All its numbers are of the shorter format on that side alone, and the sides differ by no more than a
rounding to it. Bits of every element are recorded; of older traces the numbers that were.
"""

from __future__ import annotations

import math

from rlprobe.judge import digits
from rlprobe.refine.trace import Value, error


def by(benchmark: Value, target: Value) -> tuple[str, str] | None:
    """The side that rounds, and the format to which; None where neither is known to."""
    bits = [_bits(value) for value in (benchmark, target)]
    size = error(benchmark, target)
    if size is None or 0 in bits:
        return None
    side = "target" if bits[1] < bits[0] else "benchmark"
    for name, kept in digits.FORMATS.items():
        if min(bits) <= kept < max(bits) and size <= 2.0**-kept:
            return side, name
    return None


def _bits(value: Value) -> int:
    """Significant bits that hold its numbers; 0 where none is known."""
    if value.bits is not None:
        return value.bits
    held = value.elements or [value.max, value.min]
    return digits.bits([float(n) for n in held if isinstance(n, (int, float)) and math.isfinite(n)])
