"""Rows of a table that was made elsewhere: are they what capture writes?"""

from __future__ import annotations

import polars as pl

from rlprobe.errors import StoreError


def of_another(
    table: pl.DataFrame, good: pl.Expr, what: str, where: str, named: str
) -> pl.DataFrame:
    """A table from another site, of whose rows every one is good.

    Args:
        table: of the columns that it should have.
        good: what is true of a row; null counts as false.
        what: what a good row is, in the plural, for the error.
        where: the table's path, for the error.
        named: the column that says which row it is.

    Raises:
        StoreError: a row is not.
    """
    odd = table.filter(~good.fill_null(False))
    if odd.height:
        raise StoreError(
            f"{where}: {odd.height} of {table.height} rows are no {what}, first "
            f"{odd.item(0, named)!r:.80}"
        )
    return table


def whole(column: str) -> pl.Expr:
    """Whether a list is there and none of its elements is null."""
    return (
        pl.col(column).is_not_null() & ~pl.col(column).list.eval(pl.element().is_null()).list.any()
    )
