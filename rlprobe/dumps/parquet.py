"""What reading a damaged Parquet file may end in."""

from __future__ import annotations

import polars as pl

#: polars panics over some damaged files, which is no Exception to Python.
UNREADABLE = (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
