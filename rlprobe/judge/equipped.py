"""What both sides were given before they computed anything: parameters, and ids of tokens.

Of two dumps nobody says that these are the same, and where they are not whatever follows differs by
them.
"""

from __future__ import annotations

import polars as pl

from rlprobe.compare import measures

#: Two devices' norms of the same numbers, accumulated in fp32, agree to this.
_NORM = 1e-5
_INTEGERS = r"^torch\.u?int(8|16|32|64)$"


def ids(rows: pl.DataFrame) -> pl.DataFrame:
    """Of a stage's rows, ids that embeddings were given and that were compared."""
    return rows.filter(
        (pl.col("slot") == "input")
        & (pl.col("direction") == "forward")
        & pl.col("op").str.contains("(?i)embedding")
        & pl.col("dtype_benchmark").str.contains(_INTEGERS)
        & pl.col("error_kind").is_not_null()
    )


def parameters(rows: pl.DataFrame) -> pl.DataFrame:
    """Of a stage's rows, parameters before the first update that were compared."""
    return rows.filter(
        (pl.col("slot") == "parameters")
        & (pl.col("direction") == "forward")
        & (pl.col("call") == pl.col("call").min())
        & pl.col("error_kind").is_not_null()
    )


def differing(rows: pl.DataFrame) -> pl.DataFrame:
    """Those that are no copies: extremes are elements and equal, a norm is accumulated."""
    extremes = pl.any_horizontal(
        (pl.col(f"{name}_diff").abs() > 0).fill_null(False) for name in ("max", "min")
    )
    norm = (pl.col("norm_diff").abs() > _NORM * pl.col("norm_benchmark").abs()).fill_null(False)
    elements = pl.col("error_kind").is_in([measures.TENSOR]) & (pl.col("error") > 0)
    return rows.filter(extremes | norm | elements.fill_null(False))
