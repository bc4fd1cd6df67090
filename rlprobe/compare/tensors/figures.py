"""How far two tensors are apart, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

#: Columns of records.parquet that are read off the tensors themselves (:class:`Distance`).
FIGURES: dict[str, Any] = {
    "euclidean": pl.Float64,
    "cosine": pl.Float64,
    "max_abs_err": pl.Float64,
    "max_abs_index": pl.Int64,
    "max_rel_err": pl.Float64,
    "ulp_max": pl.Float64,
    "within_1e3": pl.Float64,
    "within_5e3": pl.Float64,
    "saturated": pl.Int64,
}


@dataclass(frozen=True)
class Distance:
    """The result; ``None`` where a figure has no meaning."""

    size: int
    #: Every bit is equal, in one type.
    identical: bool
    #: ``||t - b||``.
    euclidean: float
    #: ``||t - b|| / ||b||`` (``||t||`` where the benchmark is zero).
    error: float
    cosine: float | None
    max_abs_err: float
    #: Row-major index of the element with the largest absolute error; None when all are equal.
    max_abs_index: int | None
    max_rel_err: float
    #: Most representable values between two elements; the difference itself for integers.
    ulp_max: float | None
    within_1e3: float
    within_5e3: float
    #: Elements at the type's largest magnitude on the target where the benchmark's are not.
    saturated: int
    #: Elements that are not finite on either side, and those not finite in the same way.
    nonfinite_benchmark: int
    nonfinite_target: int
    nonfinite_same: int


def cosine_of(dot: float, norm_b: float, norm_t: float) -> float:
    """The cosine of two tensors that are not zero; what rounding puts beyond 1 is 1."""
    return min(max(dot / norm_b / norm_t, -1.0), 1.0)
