"""Sketches per token: ``side/token_sketches/*.npz`` of all processes, one table a stage.

The files' format is that of :mod:`rlprobe.capture.light.token_sketches`; they are read without
pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from rlprobe.dumps import archive
from rlprobe.dumps.rows import of_another, whole
from rlprobe.errors import StoreError

#: Columns of ``token_sketches/{stage}.parquet``: a row per token of a block's output. ``order`` and
#: ``name`` are the record's in ``records/{stage}.parquet``; ``sample`` is a row of its micro-batch.
SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    "order": pl.Int32,
    "name": pl.String,
    "micro_step": pl.Int32,
    "sample": pl.Int32,
    "token": pl.Int32,
    "sketch": pl.List(pl.Float32),
}
_COLUMNS = ("name", "micro_step", "sample", "token")


class TokenSketches(NamedTuple):
    """One stage's tokens."""

    table: pl.DataFrame
    #: Numbers in a sketch.
    k: int
    #: Tokens that the disk budget did not admit.
    left_out: int


def read(side: Path, records: dict[str, pl.DataFrame]) -> dict[str, TokenSketches]:
    """The token sketches of every stage that has some.

    Args:
        side: the run's side directory.
        records: the stages' record tables (columns step, rank, order, name).

    Raises:
        StoreError: a file is damaged, belongs to no captured stage, or sizes k differ.
    """
    found: dict[str, list[TokenSketches]] = {}
    for stage, step, rank, path in archive.parts(side / "token_sketches", records):
        found.setdefault(stage, []).append(_part(path, step, rank))
    return {stage: _joined(stage, parts, records[stage]) for stage, parts in found.items()}


def require(table: pl.DataFrame, where: str) -> pl.DataFrame:
    """A table that was made elsewhere, if its rows are what capture writes.

    Args:
        table: columns of :data:`SCHEMA`.
        where: its path, for the error.

    Raises:
        StoreError: a row is none.
    """
    sizes = pl.col("sketch").list.len()
    good = pl.all_horizontal(
        pl.col("step", "rank", *_COLUMNS).is_not_null(),
        pl.min_horizontal("step", "rank", "micro_step", "sample", "token") >= 0,
        whole("sketch"),
        sizes == sizes.first(),
    )
    return of_another(table, good, "token sketches", where, "name")


def _joined(stage: str, parts: list[TokenSketches], records: pl.DataFrame) -> TokenSketches:
    sizes = {part.k for part in parts}
    if len(sizes) != 1:
        raise StoreError(f"token sketches of {stage} have different sizes: {sorted(sizes)}")
    orders = records.select("step", "rank", "name", "order").unique(
        ["step", "rank", "name"], keep="first", maintain_order=True
    )
    table = (
        pl.concat([part.table for part in parts])
        .join(orders, on=["step", "rank", "name"], how="left", maintain_order="left")
        .select(list(SCHEMA))
        .sort("step", "rank", maintain_order=True)
    )
    return TokenSketches(table, sizes.pop(), sum(part.left_out for part in parts))


def _part(path: Path, step: int, rank: int) -> TokenSketches:
    what = "token sketches"
    found = archive.arrays(path, ("names", "sketch", "k", "left_out", *_COLUMNS), what)
    names, sketch = archive.texts(found["names"], path, what), found["sketch"]
    columns = {column: found[column] for column in _COLUMNS}
    try:
        k, left_out = (int(found[name].item()) for name in ("k", "left_out"))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{path} is not a file of {what}: {error}") from error
    rows = len(sketch)
    index = columns["name"]
    good = (
        sketch.dtype == np.float32
        and sketch.shape == (rows, k)
        and all(c.dtype == np.int32 and c.shape == (rows,) for c in columns.values())
        and (rows == 0 or (index.min() >= 0 and index.max() < len(names)))
    )
    if not good:
        raise StoreError(f"{path} is not a file of {what}: its arrays do not fit together")
    table = pl.DataFrame(
        {
            "step": pl.Series([step], dtype=pl.Int32).new_from_index(0, rows),
            "rank": pl.Series([rank], dtype=pl.Int32).new_from_index(0, rows),
            "name": pl.Series(names, dtype=pl.String).gather(index),
            **{column: columns[column] for column in _COLUMNS[1:]},
            "sketch": pl.Series(sketch, dtype=pl.Array(pl.Float32, k)).cast(pl.List(pl.Float32)),
        }
    )
    return TokenSketches(table, k, left_out)
