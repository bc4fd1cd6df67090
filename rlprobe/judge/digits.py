"""How many significant bits numbers have, whatever format they are kept in.

A result that went through a shorter format is saved in a longer one, and all its numbers are still
numbers of the shorter. That so many numbers end in so many zeros by chance does not happen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Significant bits, the hidden one included, that numbers of a format have at most.
FORMATS = {"bfloat16": 8, "float16": 11}
#: Numbers that must be there, and other ones each.
_LEAST = 16
#: Numbers among which other ones are counted.
_LOOKED_AT = 4096
_FRACTION = 52


def significant(values: Sequence[npt.NDArray[np.float64]]) -> int | None:
    """The fewest bits that hold every number; None where there are too few to tell.

    Args:
        values: float64; what is not finite is left out, and 0 says nothing.
    """
    every = np.concatenate([part.ravel() for part in values]) if values else np.zeros(0)
    numbers = np.ascontiguousarray(every[np.isfinite(every) & (every != 0)], dtype=np.float64)
    if np.unique(numbers[:_LOOKED_AT]).size < _LEAST:
        return None
    return bits(numbers)


def bits(numbers: npt.ArrayLike) -> int:
    """The fewest significant bits that hold every one of some finite numbers; 0 of none.

    Args:
        numbers: however few.
    """
    held = np.ascontiguousarray(numbers, dtype=np.float64)
    if not held.size:
        return 0
    fraction = np.bitwise_or.reduce(held.view(np.uint64)) & np.uint64((1 << _FRACTION) - 1)
    used = int(fraction)
    return 1 + _FRACTION - ((used & -used).bit_length() - 1) if used else 1


def shorter(
    benchmark: Sequence[npt.NDArray[np.float64]], target: Sequence[npt.NDArray[np.float64]]
) -> str | None:
    """The format that all numbers of the target are of, and the benchmark's are not.

    Args:
        benchmark, target: of the same samples.
    """
    own, theirs = significant(benchmark), significant(target)
    if own is None or theirs is None:
        return None
    return next((name for name, bits in FORMATS.items() if theirs <= bits < own), None)
