"""Texts of numpy arrays that came from elsewhere: four bytes a character, of any number."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def require(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array whose characters there are; numpy makes an error of its own of others.

    Raises:
        ValueError: it holds a number that is no character's.
    """
    if array.dtype.kind == "U" and array.dtype.itemsize:
        numbers = np.dtype(np.uint32).newbyteorder(array.dtype.byteorder)
        points = np.frombuffer(array.tobytes(), numbers)
        if points.size and points.max() > sys.maxunicode:
            raise ValueError("it holds characters that there are not")
    return array
