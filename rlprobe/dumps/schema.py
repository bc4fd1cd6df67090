"""Columns of record tables, apart from what reads and writes them."""

from __future__ import annotations

from typing import Any

import polars as pl

#: dtype of a row for something in the file that cannot be read; ``value`` says why.
UNREADABLE_DTYPE = "unreadable"
#: ``op`` of a record that is a field of a sample of a rollout (:mod:`rlprobe.dumps.rollouts`).
ROLLOUT = "Rollout"

#: Slots that dumps, what is saved by hand and rollouts have.
SLOTS = (
    *("input", "output", "parameters", "grad", "grad_reduced", "grad_clipped", "change", "loss"),
    *("debug", "entry", "is_nan", "prompt", "response", "field"),
)

#: Types of scalars that are floats: Python's, and numpy's as msprobe names them.
FLOATS = ("float", "float16", "float32", "float64", "longdouble")
#: Types of scalars that are whole numbers, likewise.
WHOLE = ("int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))

#: Columns of one dump file, a row per leaf in msprobe's row order.
LEAF_SCHEMA: dict[str, Any] = {
    "name": pl.String,
    "module": pl.String,
    "op": pl.String,
    "call": pl.Int32,
    "direction": pl.String,
    "slot": pl.String,
    "index": pl.String,
    "dtype": pl.String,
    "shape": pl.List(pl.Int64),
    "requires_grad": pl.Boolean,
    "max": pl.Float64,
    "min": pl.Float64,
    "mean": pl.Float64,
    "norm": pl.Float64,
    "value": pl.String,
    "digest": pl.String,
    "sketch": pl.List(pl.Float32),
    "data_name": pl.String,
    "api": pl.String,
}

#: Columns of a record table, in this order.
SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    "order": pl.Int32,
    **{key: kind for key, kind in LEAF_SCHEMA.items() if key not in ("data_name", "api")},
    "data": pl.String,
    "data_name": pl.String,
    "stack": pl.String,
}
