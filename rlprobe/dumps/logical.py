"""Records of whole stages by coordinates: ``side/logical/*.npz`` of all processes, a table a stage.

The files' format is that of :mod:`rlprobe.capture.light.logical`; they are read without pickle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe.coordinates import GROUPS
from rlprobe.dumps import archive
from rlprobe.dumps.rows import of_another, whole
from rlprobe.errors import StoreError
from rlprobe.sketch import K

_TEXTS = ("module", "op", "direction", "slot", "dtype")
_WHOLE = ("sequence", "count", "tokens", "calls", "first", "features", "width")
_NUMBERS = ("squares", "sum", "max", "min")
#: Columns of ``logical/{stage}.parquet``: a row per process, module, direction and slot.
SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    **dict.fromkeys(_TEXTS, pl.String),
    **dict.fromkeys(_WHOLE, pl.Int64),
    **dict.fromkeys(_NUMBERS, pl.Float64),
    # which tokens they were: the sum of their keys, 16 hexadecimal digits
    "identity": pl.String,
    # GROUPS sketches of K numbers, one behind the other
    "sketch": pl.List(pl.Float64),
}


def read(side: Path, stages: set[str]) -> dict[str, pl.DataFrame]:
    """The table of every stage that has records by coordinates.

    Args:
        side: the run's side directory.
        stages: those that were captured.

    Raises:
        StoreError: a file is damaged or belongs to no captured stage.
    """
    return archive.tables(side / "logical", stages, _part)


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
        pl.col("sketch").list.len() == GROUPS * K,
        pl.col("identity").str.contains("^[0-9a-f]{16}$"),
        pl.col("width") >= 1,
        pl.col("features").is_between(1, pl.col("width")),
        pl.col("first").is_between(0, pl.col("width") - pl.col("features")),
        pl.min_horizontal("count", "tokens", "calls") >= 1,
        whole("sketch"),
    )
    return of_another(table, good, "records by coordinates", where, "module")


def _part(path: Path, step: int, rank: int) -> pl.DataFrame:
    what = "records by coordinates"
    names = (*_TEXTS, *_WHOLE, *_NUMBERS, "identity", "sketch")
    arrays = archive.arrays(path, names, what)
    rows = len(arrays["sketch"])
    good = (
        arrays["sketch"].shape == (rows, GROUPS, K)
        and arrays["sketch"].dtype == np.float64
        and arrays["identity"].shape == (rows, 2)
        and arrays["identity"].dtype == np.int64
        and all(arrays[name].shape == (rows,) for name in (*_TEXTS, *_WHOLE, *_NUMBERS))
        and all(arrays[name].dtype == np.int64 for name in _WHOLE)
        and all(arrays[name].dtype == np.float64 for name in _NUMBERS)
    )
    if not good:
        raise StoreError(f"{path} is not a file of {what}: its arrays do not fit together")
    high, low = arrays["identity"].T
    sketches = pl.Series(
        arrays["sketch"].reshape(rows, GROUPS * K), dtype=pl.Array(pl.Float64, GROUPS * K)
    )
    return pl.DataFrame(
        {
            "step": pl.Series([step], dtype=pl.Int32).new_from_index(0, rows),
            "rank": pl.Series([rank], dtype=pl.Int32).new_from_index(0, rows),
            **{name: archive.texts(arrays[name], path, what) for name in _TEXTS},
            **{name: arrays[name] for name in (*_WHOLE, *_NUMBERS)},
            "identity": [f"{a:08x}{b:08x}" for a, b in zip(high, low, strict=True)],
            "sketch": sketches.cast(pl.List(pl.Float64)),
        },
        schema=SCHEMA,
    )
