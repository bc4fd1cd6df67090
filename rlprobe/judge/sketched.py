"""Both sides' sketches of compared records, from the runs in the store.

A comparison keeps what follows from two sketches (the error), not the sketches. Questions that need
them are asked of few records, and answered here without comparing again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.dumps import records
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.errors import StoreError
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET

if TYPE_CHECKING:
    from rlprobe.store.read import Run

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]
#: rank, name -> the sketches of the benchmark's and the target's whole tensor, where a row stands
#: for several shards (:mod:`rlprobe.judge.shards`).
Joined = Mapping[tuple[int, str], tuple[Vector, Vector]]
NOTHING: Joined = {}


def both(
    results: Results,
    stage: str,
    step: int,
    rows: pl.DataFrame,
    slots: list[str],
    joined: Joined = NOTHING,
) -> tuple[pl.DataFrame, Matrix, Matrix] | None:
    """The rows that have a sketch on both sides, and the sketches, a row each.

    Args:
        results: where both runs are found.
        stage: canonical name.
        step: captured step, from 0.
        rows: rank, name, name_benchmark, name_target and whatever else is wanted back.
        slots: of the rows, so that no others are read.
        joined: sketches that are known already; other rows' are read.

    Returns:
        None where no row has them.

    Raises:
        StoreError: a record table is damaged.
    """
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    if runs[0] is None or runs[1] is None or rows.is_empty():
        return None
    left, right = (of(run, stage, step, slots) for run in runs if run is not None)
    if left is None or right is None:
        return None
    known = _known(joined, left.schema["sketch"])
    found = (
        rows.join(known, on=["rank", "name"], how="anti")
        .join(left, left_on=["rank", "name_benchmark"], right_on=["rank", "name"])
        .join(right, left_on=["rank", "name_target"], right_on=["rank", "name"], suffix="_target")
    )
    found = pl.concat([found, rows.join(known, on=["rank", "name"])])
    width = pl.col("sketch").list.len()
    found = found.filter((width == pl.col("sketch_target").list.len()) & (width == width.first()))
    if found.is_empty():
        return None
    b, t = (_matrix(found.get_column(name)) for name in ("sketch", "sketch_target"))
    return found.drop("sketch", "sketch_target"), b, t


def _known(joined: Joined, kind: pl.DataType) -> pl.DataFrame:
    keys = [{"rank": rank, "name": name} for rank, name in joined]
    schema = {"rank": pl.Int32(), "name": pl.String(), "sketch": kind, "sketch_target": kind}
    rows = [
        key | {"sketch": pair[0].tolist(), "sketch_target": pair[1].tolist()}
        for key, pair in zip(keys, joined.values(), strict=True)
    ]
    return pl.DataFrame(rows, schema=schema)


def _matrix(sketches: pl.Series) -> Matrix:
    flat = sketches.explode(empty_as_null=False, keep_nulls=False).to_numpy()
    return np.asarray(flat, dtype=np.float64).reshape(len(sketches), -1)


def of(run: Run, stage: str, step: int, slots: list[str]) -> pl.DataFrame | None:
    """One run's sketches: rank, name, sketch; None where there are none.

    Raises:
        StoreError: the record table is damaged.
    """
    try:
        path = run.records(stage)
    except StoreError:
        return None  # not captured: the gate says so
    found = (
        records.scan(path)
        .filter(pl.col("slot").is_in(slots) & (pl.col("step") == step))
        .select("rank", "name", pl.col("sketch").cast(pl.List(pl.Float64)))
        .filter(pl.col("sketch").is_not_null())
        .unique(["rank", "name"], keep="first", maintain_order=True)
    )
    try:
        table = found.collect()
    except UNREADABLE as error:
        raise StoreError(f"{path} is not a readable record table: {error}") from error
    return table if table.height else None
