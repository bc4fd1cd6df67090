"""Chosen experts per token: ``side/routing/*.npz`` of all processes, a table a stage.

The files' format is that of :mod:`rlprobe.capture.light.routing`; they are read without pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe.dumps import archive
from rlprobe.dumps.rows import of_another
from rlprobe.errors import StoreError

#: Columns of ``routing/{stage}.parquet``: a row per process, router and token.
SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    # Hugging Face path of the router, and how many experts it chooses from
    "module": pl.String,
    "experts": pl.Int32,
    # the token's key, rlprobe.coordinates
    "token": pl.UInt64,
    # numbers of experts, ascending; -1 for none
    "chosen": pl.List(pl.Int16),
}
_WHAT = "chosen experts"


def read(side: Path, stages: set[str]) -> dict[str, pl.DataFrame]:
    """The table of every stage whose model has routers.

    Args:
        side: the run's side directory.
        stages: those that were captured.

    Raises:
        StoreError: a file is damaged or belongs to no captured stage.
    """
    return archive.tables(side / "routing", stages, part)


def require(table: pl.DataFrame, where: str) -> pl.DataFrame:
    """A table that was made elsewhere, if its rows are what capture writes.

    Args:
        table: columns of :data:`SCHEMA`.
        where: its path, for the error.

    Raises:
        StoreError: a row is none.
    """
    good = pl.all_horizontal(
        pl.all().is_not_null(),
        pl.col("experts") >= 1,
        pl.col("chosen").list.len() >= 1,
        pl.col("chosen").list.min() >= -1,
        pl.col("chosen").list.max() < pl.col("experts"),
    )
    return of_another(table, good, _WHAT, where, "module")


def part(path: Path, step: int, rank: int) -> pl.DataFrame:
    """One process's file as rows of the table.

    Raises:
        StoreError: it is damaged.
    """
    names = ("modules", "experts", "module", "token", "chosen", "left_out")
    arrays = archive.arrays(path, names, _WHAT)
    modules = archive.texts(arrays["modules"], path, _WHAT)
    index, token, chosen = arrays["module"], arrays["token"], arrays["chosen"]
    rows = len(token)
    good = (
        arrays["experts"].shape == (len(modules),)
        and arrays["experts"].dtype == np.int32
        and index.shape == token.shape == (rows,)
        and index.dtype == np.int32
        and token.dtype == np.uint64
        and chosen.dtype == np.int16
        and chosen.ndim == 2
        and len(chosen) == rows
        and chosen.shape[1] >= 1
        and (rows == 0 or (index.min() >= 0 and index.max() < len(modules)))
    )
    if not good:
        raise StoreError(f"{path} is not a file of {_WHAT}: its arrays do not fit together")
    table = pl.DataFrame(
        {
            "step": pl.Series([step], dtype=pl.Int32).new_from_index(0, rows),
            "rank": pl.Series([rank], dtype=pl.Int32).new_from_index(0, rows),
            "module": pl.Series(modules, dtype=pl.String).gather(index),
            "experts": pl.Series(arrays["experts"]).gather(index),
            "token": token,
            "chosen": pl.Series(chosen, dtype=pl.Array(pl.Int16, chosen.shape[1])).cast(
                pl.List(pl.Int16)
            ),
        },
        schema=SCHEMA,
    )
    return require(table, str(path))
