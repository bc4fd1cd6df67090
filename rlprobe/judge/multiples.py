"""Whether a record is a multiple of the benchmark's, from both sides' sketches.

The error and the two norms say little of it: with e = || t - b || / || b || and
f = || t || / || b || the angle between t and b follows from e**2 = 1 + f**2 - 2 f cos, but a sketch
knows e to 9 % only. The sketches themselves say more, because they are linear: a multiple's is the
same multiple of the benchmark's, exactly, and what t is beyond its best multiple of b is seen.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl

from rlprobe.judge import sketched
from rlprobe.judge.analysis import Finding
from rlprobe.judge.inputs import Results
from rlprobe.judge.row import Row, columns_where

#: Column: what the best multiple of the benchmark leaves of the target, over the benchmark's norm.
RESIDUAL = "residual"
_KEYS = ["rank", "name"]
_NAMES = [*_KEYS, "name_benchmark", "name_target"]


def measured(results: Results, step: int, finding: Finding) -> Finding:
    """A stage that parts, with ``residual`` beside its differing records and its origin.

    Null where a side has no sketch.

    Raises:
        StoreError: a record table is damaged.
    """
    stage = finding.stage
    matched = pl.col("beyond") & (pl.col("status") == "matched")
    differing = columns_where(stage.rows, matched, *_NAMES, "slot")
    names = differing.select(_NAMES).unique(_KEYS, keep="first", maintain_order=True)
    slots = differing.get_column("slot").unique().to_list()
    found = sketched.both(results, stage.name, step, names, slots, stage.joined)
    if found is None:
        return finding
    rows, b, t = found
    residuals = pl.Series(RESIDUAL, _residuals(b, t)).fill_nan(None)
    table = rows.select(_KEYS).with_columns(residuals).unique(_KEYS, keep="first")
    processes = [
        dataclasses.replace(process, rows=_with_residuals(process.rows, table))
        for process in stage.processes
    ]
    origin = finding.origin
    if origin is not None and origin.row.get("rank") is not None:
        own = table.filter(
            (pl.col("name") == origin.row["name"]) & (pl.col("rank") == origin.row["rank"])
        )
        known = own.get_column(RESIDUAL).to_list()
        row: Row = {**origin.row, "residual": (known or [None])[0]}
        origin = dataclasses.replace(origin, row=row)
    return dataclasses.replace(
        finding, stage=dataclasses.replace(stage, processes=processes), origin=origin
    )


def _with_residuals(rows: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    # joined by itself: a join copies every column, also those that ranks have in common
    own = rows.select(_KEYS).join(table, on=_KEYS, how="left", maintain_order="left")
    return rows.with_columns(own.get_column(RESIDUAL))


def _residuals(b: sketched.Matrix, t: sketched.Matrix) -> sketched.Matrix:
    with np.errstate(all="ignore"):
        squares = np.einsum("ij,ij->i", b, b)
        times = np.einsum("ij,ij->i", b, t) / squares
        left = t - times[:, None] * b
        found = np.sqrt(np.einsum("ij,ij->i", left, left) / squares)
    residuals: sketched.Matrix = np.where(np.isfinite(found), found, np.nan)
    return residuals
