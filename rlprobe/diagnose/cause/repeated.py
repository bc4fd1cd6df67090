"""The same record in every micro-batch: a law is one only if it holds in all of them."""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.diagnose.cause.shape import Shape, of
from rlprobe.judge.analysis import Finding
from rlprobe.judge.roundoff import UNIT

#: What tells a record from others of its micro-batch.
_SAME = ("rank", "phase", "module", "op", "slot", "index")
#: Factors of one law differ by this share of the factor's effect at most,
_APART = 0.1
#: and by this share of the floor, which is four standard deviations of round-off.
_NOISE = 1.0 / 3.0


def rows(finding: Finding, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The record in all micro-batches that are judged and where it differs; the row is one."""
    table = finding.stage.rows
    same = pl.col("judged") & pl.col("beyond")
    for name in _SAME:
        same &= pl.col(name).eq_missing(pl.lit(row.get(name), table.schema[name]))
    found = table.filter(same).sort("micro_batch").to_dicts()
    return found or [row]


def factors(finding: Finding, row: dict[str, Any]) -> tuple[float, float] | None:
    """Smallest and largest factor of the micro-batches where one factor explains them all."""
    if not of(row).scaled:
        return None
    every = rows(finding, row)
    shapes = [of(each) for each in every]
    if not all(shape.scaled for shape in shapes):
        return None
    low, high = _range(shapes)
    unit = UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    effect = min(min(abs(f - 1.0), abs(f)) for f in (low, high))
    noise = _NOISE * max(float(each.get("floor") or 0.0) for each in every)
    return (low, high) if high - low <= _APART * effect + noise + 2.0 * unit else None


def sizes(finding: Finding, row: dict[str, Any]) -> tuple[float, float] | None:
    """Smallest and largest ratio of norms over micro-batches; None where there is but one."""
    shapes = [shape for each in rows(finding, row) if (shape := of(each)).factor is not None]
    return _range(shapes) if len(shapes) > 1 else None


def rounds(finding: Finding, row: dict[str, Any]) -> bool:
    """Whether one rounding explains the record in every micro-batch."""
    if of(row).rounded_to is None:
        return False
    return all(of(each).rounded_to is not None for each in rows(finding, row))


def _range(shapes: list[Shape]) -> tuple[float, float]:
    known = [shape.factor for shape in shapes if shape.factor is not None]
    return min(known), max(known)
