"""Tables that a spreadsheet opens as CSV without computing what is in them.

Names and texts come from dumps, which anybody may have made: a cell that begins as a formula does
is one to a spreadsheet, which may fetch an address or start a program for it.
"""

from __future__ import annotations

import polars as pl

#: What a spreadsheet takes for the beginning of a formula; the wide forms are taken so in East
#: Asian settings, and a tab, a return or a line end is looked past.
_FORMULA = r"^[=+\-@\t\r\n＝＋－＠]"
#: A number that is written as a text, as every cell of msprobe's tables is.
_NUMBER = r"^[+-]?(\d+\.?\d*([eE][+-]?\d+)?|inf|nan)%?$"


def guarded(table: pl.DataFrame, *, numbers: bool = False) -> pl.DataFrame:
    """The table; texts that a spreadsheet would compute begin with an apostrophe.

    Args:
        table: columns of texts are looked at, others stay.
        numbers: texts that are numbers stay as well.
    """
    return table.with_columns(
        _plain(pl.col(name), numbers).alias(name)
        for name, kind in table.schema.items()
        if kind == pl.String
    )


def _plain(column: pl.Expr, numbers: bool) -> pl.Expr:
    formula = column.str.contains(_FORMULA)
    if numbers:
        formula = formula & ~column.str.contains(_NUMBER)
    return pl.when(formula).then(pl.lit("'") + column).otherwise(column)
