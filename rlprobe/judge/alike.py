"""What ranks have in common, held once.

The ranks of a stage run the same modules: names, shapes, order and much else are the same column on
each of them. Of 64 ranks with 100,000 records that is most of what there is to hold.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.execution import Call

#: Other versions of a column (a pipeline's ranks run other modules) that are looked for.
_MOST = 8


class Alike:
    """Columns and calls that were seen, to be shared by those that are equal to them."""

    def __init__(self) -> None:
        self._columns: dict[str, list[pl.Series]] = {}
        self._calls: list[list[Call]] = []

    def rows(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The same rows, with columns that were seen before in place of equal ones.

        Floating-point numbers are each rank's own (and 0 would equal -0), but where there are none.
        """
        return rows.with_columns(
            self._column(column)
            for column in rows.get_columns()
            if not column.dtype.is_float() or column.null_count() == len(column)
        )

    def _column(self, column: pl.Series) -> pl.Series:
        known = self._columns.setdefault(column.name, [])
        for other in known:
            if column.equals(other, check_dtypes=True):
                return other
        if len(known) < _MOST:
            known.append(column)
        return column

    def calls(self, calls: list[Call]) -> list[Call]:
        """The same calls: a list that was seen before, where one is equal."""
        for other in self._calls:
            if calls == other:
                return other
        if len(self._calls) < _MOST:
            self._calls.append(calls)
        return calls
