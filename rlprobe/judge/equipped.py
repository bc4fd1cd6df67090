"""What both sides were given before they computed anything: parameters, and ids of tokens.

Of two dumps nobody says that these are the same, and where they are not whatever follows differs by
them.
"""

from __future__ import annotations

import polars as pl

from rlprobe.compare import measures
from rlprobe.judge import roundoff

#: Two devices' norms of the same numbers, accumulated in fp32, agree to this.
_NORM = 1e-5
#: What is known of records that nothing was measured of: their checksums.
_BY_CHECKSUM = (measures.CHECKSUMS_DIFFER, measures.XOR_EQUAL)
_SIDES = ("benchmark", "target")
_INTEGERS = r"^torch\.u?int(8|16|32|64)$"


def ids(rows: pl.DataFrame) -> pl.DataFrame:
    """Of a stage's rows, ids that embeddings were given and of which anything was compared."""
    return every_ids(rows).filter(_compared())


def every_ids(rows: pl.DataFrame) -> pl.DataFrame:
    """The same, whether anything was compared of them or not, and of one side alone."""
    whole = (pl.col(f"dtype_{side}").str.contains(_INTEGERS) for side in _SIDES)
    return rows.filter(
        (pl.col("slot") == "input")
        & (pl.col("direction") == "forward")
        & pl.col("op").str.contains("(?i)embedding")
        & pl.any_horizontal(*whole)
    )


def whole_numbers() -> pl.Expr:
    """Whether a record is a tensor of whole numbers."""
    return pl.col("dtype_benchmark").str.contains(_INTEGERS)


def two_formats() -> pl.Expr:
    """Whether a record is a tensor of floating-point numbers of one format on either side."""
    floats = [pl.col(f"dtype_{side}").is_in(list(roundoff.UNIT)) for side in _SIDES]
    return (
        pl.all_horizontal(*floats)
        & pl.col("shape_benchmark").is_not_null()
        & (pl.col("dtype_benchmark") != pl.col("dtype_target"))
    )


def parameters(rows: pl.DataFrame) -> pl.DataFrame:
    """Of a stage's rows, parameters before the first update of which anything was compared."""
    return every_parameter(rows).filter(_compared())


def every_parameter(rows: pl.DataFrame) -> pl.DataFrame:
    """The same, whether anything was compared of them or not, and of one side alone."""
    return rows.filter(
        (pl.col("slot") == "parameters")
        & (pl.col("direction") == "forward")
        & (pl.col("call") == pl.col("call").min())
    )


def alone(rows: pl.DataFrame) -> str | None:
    """The side that alone recorded these; None where each recorded any, or none did."""
    there = [bool(rows.get_column(f"name_{side}").is_not_null().any()) for side in _SIDES]
    return None if there[0] == there[1] else _SIDES[there.index(True)]


def unlike_checksums(rows: pl.DataFrame) -> bool:
    """Whether that their checksums are of two kinds is why nothing of these was compared."""
    return bool((rows.get_column("reason") == measures.CHECKSUMS_UNLIKE).any())


def _compared() -> pl.Expr:
    return pl.col("error_kind").is_not_null() | pl.col("reason").is_in(_BY_CHECKSUM)


def by_checksum(rows: pl.DataFrame) -> pl.DataFrame:
    """Those of which nothing but checksums was compared."""
    return rows.filter(pl.col("reason").is_in(_BY_CHECKSUM))


def unknown(rows: pl.DataFrame) -> pl.DataFrame:
    """Those whose checksums agree, which are blind to order, and of which no more is there."""
    return rows.filter(pl.col("reason") == measures.XOR_EQUAL)


def differing(rows: pl.DataFrame) -> pl.DataFrame:
    """Those that are no copies: extremes are elements and equal, a norm is accumulated.

    Where the formats are two, what rounding to the coarser makes of a copy is no difference.
    """
    units = [roundoff.unit(f"dtype_{side}") for side in _SIDES]
    rounded = pl.when(two_formats()).then(pl.max_horizontal(*units)).fill_null(0.0)
    extremes = pl.any_horizontal(
        (pl.col(f"{name}_diff").abs() > rounded * pl.col(f"{name}_benchmark").abs()).fill_null(
            False
        )
        for name in ("max", "min")
    )
    allowed = pl.max_horizontal(rounded, pl.lit(_NORM)) * pl.col("norm_benchmark").abs()
    norm = (pl.col("norm_diff").abs() > allowed).fill_null(False)
    exact = pl.col("error_kind") == measures.TENSOR
    elements = (exact & (pl.col("error") > rounded)).fill_null(False)
    checksums = (pl.col("reason") == measures.CHECKSUMS_DIFFER).fill_null(False)
    return rows.filter(extremes | norm | elements | checksums)
