"""Key data of two sides joined by sample, and what they differ by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rlprobe.compare.samples import pairing
from rlprobe.compare.samples.apart import value_by_value
from rlprobe.compare.samples.pairing import Pair
from rlprobe.dumps.key_data import Array, Row
from rlprobe.terminal import counted

#: Columns of key_data.parquet: a row per sample of a key and step.
SCHEMA: dict[str, Any] = {
    "key": pl.String,
    "step": pl.Int32,
    "sample": pl.String,
    # occurrence of the same sample
    "occurrence": pl.Int32,
    # matched, benchmark_only, target_only, shape or nonfinite
    "status": pl.String,
    **{
        f"{name}_{side}": pl.Int32
        for side in ("benchmark", "target")
        for name in ("rank", "micro_step", "row", "tokens")
    },
    # relative L2 difference
    "error": pl.Float64,
    "mean_abs_err": pl.Float64,
    "max_abs_err": pl.Float64,
    # token with the largest difference, counted over valid tokens
    "max_abs_token": pl.Int32,
    # first token that differs at all
    "first_token": pl.Int32,
    "identical": pl.Boolean,
}


_NAMELESS = "no tokens in their micro-batches, no mock proof"


@dataclass(frozen=True)
class Joined:
    """One key's rows, and what could not be joined and why."""

    table: pl.DataFrame
    notes: tuple[str, ...] = ()


def join(key: str, step: int, benchmark: list[Row], target: list[Row], why: str = "") -> Joined:
    """What rows of the same sample (:mod:`pairing`) differ by.

    Args:
        key, step: what of.
        benchmark, target: its rows.
        why: what the micro-batches say of rows that have no sample.
    """
    notes = []
    nameless = [sum(row.sample is None for row in side) for side in (benchmark, target)]
    if any(nameless):
        notes.append(
            f"{key}, step {step}: {counted(nameless[0], 'row')} of the benchmark and "
            f"{nameless[1]:,} of the target belong to samples that nothing names "
            f"({why or _NAMELESS}); they are not joined"
        )
    pairs = list(pairing.pairs(benchmark, target))
    alone = [pair for pair in pairs if pair.benchmark is None or pair.target is None]
    if any(row.of > 1 for pair in alone for row in pair[2:] if row is not None):
        lone = [
            sum(side is not None for side in sides)
            for sides in zip(*(p[2:] for p in alone), strict=True)
        ]
        notes.append(
            f"{key}, step {step}: {counted(lone[0], 'number')} of the benchmark and {lone[1]:,} of "
            "the target are of micro-batches that hold other samples on the other side, and were "
            "not joined; cut both sides into the same micro-batches, or save a number a sample"
        )
    found = [_compared(key, step, pair) for pair in pairs]
    return Joined(pl.DataFrame(found, schema=SCHEMA, orient="row"), tuple(notes))


def _compared(key: str, step: int, pair: Pair) -> dict[str, Any]:
    sample, occurrence, one, other = pair
    result: dict[str, Any] = dict.fromkeys(SCHEMA)
    result.update(key=key, step=step, sample=sample, occurrence=occurrence, identical=False)
    for side, row in (("benchmark", one), ("target", other)):
        if row is not None:
            result[f"rank_{side}"] = row.rank
            result[f"micro_step_{side}"] = row.micro_step
            result[f"row_{side}"] = row.index
            result[f"tokens_{side}"] = len(row.values)
    if one is None or other is None or sample is None:
        result["status"] = "target_only" if one is None else "benchmark_only"
        return result
    if one.values.shape != other.values.shape:
        result["status"] = "shape"
        return result
    result.update(_difference(one.values, other.values))
    return result


def _difference(own: Array, other: Array) -> dict[str, Any]:
    _, difference = value_by_value(own, other)
    if not np.isfinite(difference).all():
        return {"status": "nonfinite"}
    b, t = own.astype(np.float64), other.astype(np.float64)
    rows = difference.reshape(len(difference), math.prod(difference.shape[1:]))
    per_token = rows.max(axis=1, initial=0.0)
    finite = np.isfinite(b) & np.isfinite(t)
    norms = [float(np.linalg.norm(side[finite])) for side in (b, t)]
    distance = float(np.linalg.norm(difference))
    scale = norms[0] or norms[1]
    differing = np.flatnonzero(per_token)
    return {
        "status": "matched",
        "error": distance / scale if scale else 0.0,
        "mean_abs_err": float(difference.mean()) if difference.size else 0.0,
        "max_abs_err": float(per_token.max(initial=0.0)),
        "max_abs_token": int(per_token.argmax()) if len(differing) else None,
        "first_token": int(differing[0]) if len(differing) else None,
        "identical": not len(differing),
    }


def described(table: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """By key: rows of each status, how many are identical, and the largest differences."""
    of = pl.col("status")
    counts = [
        (of == status).sum().alias(status)
        for status in ("matched", "benchmark_only", "target_only", "shape", "nonfinite")
    ]
    found = table.group_by("key").agg(
        *counts,
        pl.col("identical").sum(),
        max_error=pl.col("error").filter(pl.col("error").is_finite()).max(),
        max_abs_err=pl.col("max_abs_err").max(),
    )
    return {row.pop("key"): row for row in found.sort("key").iter_rows(named=True)}
