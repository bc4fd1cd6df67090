"""The JSON beside an array of key data: what it was before it was written, and what it holds.

``{key}.json`` says the format of the tensor (a file has no bfloat16, and what is shorter than fp32
is widened), its statistics, where ragged rows begin, and which samples they are of.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import DumpError

Array = npt.NDArray[Any]

#: Formats that are widened to fp32 in a file.
_WIDENED = ("bfloat16", "float16", "float8")
#: Statistics are of the very numbers in the file, in fp64: they agree to the last digits.
_SAME = 1e-6


def described(directory: Path, key: str) -> dict[str, Any]:
    """What stands in the JSON; empty where there is none.

    Raises:
        DumpError: it is not key data's.
    """
    path = directory / f"{key}.json"
    try:
        whole = jsonfile.load(path, nonfinite=True) if path.is_file() else {}
        found = jsonfile.mapping(whole).get("data", {})
    except DocumentError as error:
        raise DumpError(f"{path} is not key data: {error}") from error
    if not isinstance(found, dict):
        raise DumpError(f"{path} is not key data: its data is no object")
    return found


def format_of(said: dict[str, Any]) -> str:
    """The format of the tensor where the file has a wider one; empty where it has the tensor's.

    Args:
        said: of :func:`described`.
    """
    named = str(said.get("dtype") or "").removeprefix("torch.")
    return named if named.startswith(_WIDENED) else ""


def contradicted(said: dict[str, Any], values: Array) -> str | None:
    """The first statistic that is not that of the values; None where all are, or none is said.

    Args:
        said: of :func:`described`.
        values: all of the array.
    """
    if not values.size:
        return None
    own = statistics(values)
    size = max(abs(own["max"]), abs(own["min"]))
    for name, number in own.items():
        value = said.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            scale = number if name == "norm" else size
            if not _equal(float(value), number, scale):
                return name
    return None


def statistics(values: Array) -> dict[str, float]:
    """What stands beside an array that has values: max, min, mean and L2 norm, in fp64."""
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return {
            "max": float(wide.max()),
            "min": float(wide.min()),
            "mean": float(wide.mean()),
            "norm": float(np.linalg.norm(wide.reshape(-1))),
        }


def _equal(value: float, other: float, scale: float) -> bool:
    if math.isnan(value) or math.isnan(other):
        return math.isnan(value) and math.isnan(other)
    return value == other or abs(value - other) <= _SAME * scale
