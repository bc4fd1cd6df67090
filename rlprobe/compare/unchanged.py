"""Columns of records.parquet that record tables of the store hold already, row group for row group.

Where both sides have the same records in the same order, half of the columns are theirs as they
are. They are copied as they are encoded there, which is most of what writing the table costs; and a
column whose bytes are the same on both sides is read once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlprobe.compare.match import pairs
from rlprobe.compare.tables import Stored, Table
from rlprobe.documents import parquetfile
from rlprobe.documents.parquetfile import Copied, Layout

#: Column of records.parquet -> the side whose record table has it, and its name there.
_SOURCES: dict[str, tuple[int, str]] = {
    "order": (0, "order"),
    **{name: (0, name) for name in pairs.COMMON},
    **{f"{name}_{side}": (at, name) for at, side in enumerate(pairs.SIDES) for name in pairs.BOTH},
}


class _Side(NamedTuple):
    """One side's record table, and the row groups in it that are a process's rows."""

    path: Path
    layout: Layout
    groups: range

    def column(self, file: BinaryIO, name: str) -> Copied:
        return Copied(file, self.layout, name, self.groups)


class Unchanged:
    """What of two record tables may be copied; nothing until they turn out to be such."""

    def __init__(self, processes: int = 0) -> None:
        """Begin with nothing.

        Args:
            processes: pairs of processes that one table is written of. Of several one may begin
                within another's row group; then their record tables are not looked at.
        """
        self._alone = processes == 1
        self._sides: list[_Side] = []

    def look(self, benchmark: Table, target: Table, length: int) -> None:
        """Look at both sides of a process, of which ``length`` records are measured at a time.

        Raises:
            OSError: a record table cannot be read.
        """
        if not (self._alone and isinstance(benchmark, Stored) and isinstance(target, Stored)):
            return
        found = []
        for side in (benchmark, target):
            with side.path.open("rb") as file:
                try:
                    layout = parquetfile.layout(file)
                except ValueError:
                    return  # polars reads it, so that it is encoded like any other
            found.append(_Side(side.path, layout, _groups(layout, side, length)))
        if all(side.groups for side in found) and benchmark.height == target.height:
            self._sides = found

    def forget(self) -> None:
        """Their records are not the same, or are not measured so."""
        self._sides = []

    def same(self, column: str) -> bool:
        """Whether the bytes of a column tell that it is the same on both sides.

        Raises:
            OSError: a record table cannot be read.
        """
        if not self._sides:
            return False
        with self._open() as files:
            sides = [s.column(f, column) for s, f in zip(self._sides, files, strict=True)]
            return parquetfile.equal(*sides)

    @contextlib.contextmanager
    def writer(
        self, file: BinaryIO, schema: Mapping[str, Any], metadata: dict[str, str]
    ) -> Iterator[parquetfile.Writer | None]:
        """Who writes the table with what is copied; None where there is nothing to copy.

        Raises:
            OSError: a record table cannot be read.
        """
        if not self._sides:
            yield None
            return
        with self._open() as files:
            empty = parquetfile.empty(schema, metadata)
            copied = {
                name: self._sides[at].column(files[at], own)
                for name, (at, own) in _SOURCES.items()
                if parquetfile.alike(self._sides[at].layout, own, empty, name)
            }
            yield parquetfile.Writer(file, empty, schema, copied) if copied else None

    @contextlib.contextmanager
    def _open(self) -> Iterator[list[BinaryIO]]:
        with contextlib.ExitStack() as opened:
            yield [opened.enter_context(side.path.open("rb")) for side in self._sides]


def _groups(layout: Layout, side: Stored, length: int) -> range:
    """The row groups that are a side's rows, each of ``length`` but the last; else none."""
    rows = [group.rows for group in layout.groups]
    wanted = [min(length, side.height - at) for at in range(0, side.height, length)]
    starts = [0, *itertools.accumulate(rows)]
    if side.first not in starts:
        return range(0)
    first = starts.index(side.first)
    found = range(first, first + len(wanted))
    return found if rows[first : found.stop] == wanted else range(0)
