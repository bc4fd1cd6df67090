"""How far two rows of numbers are apart, value by value."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlprobe.dumps.key_data import Array

#: Rounding of whole numbers to float64 is felt in differences below this: each is off by 1,024 at
#: most.
_EXACT = 2.0**12


def value_by_value(
    own: Array, other: Array
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Where two arrays of one shape are equal, NaN and NaN too, and ``|other - own|``.

    The difference is 0 where they are equal, and not finite where a value is that on one side
    alone. Whole numbers are taken as they are: beyond 2**53 a float64 has not every one.
    """
    b, t = own.astype(np.float64), other.astype(np.float64)
    same = (other == own) | (np.isnan(t) & np.isnan(b))
    with np.errstate(invalid="ignore"):  # infinity less infinity
        difference = np.where(same, 0.0, np.abs(t - b))
    if own.dtype.kind in "iu" and other.dtype.kind in "iu":
        near = ~same & (difference < _EXACT)
        exact = other[near].astype(object) - own[near].astype(object)
        difference[near] = np.abs(exact).astype(np.float64)
    return same, difference
