"""The records of one process: in memory, or in a record table and read a slice at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import polars as pl

from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.errors import StoreError


class Table(Protocol):
    """Records of one process in execution order (columns of :mod:`rlprobe.dumps.schema`)."""

    @property
    def height(self) -> int:
        """Number of records."""

    @property
    def names(self) -> pl.Series:
        """msprobe's name of every record."""

    def rows(
        self, columns: Sequence[str], start: int = 0, length: int | None = None
    ) -> pl.DataFrame:
        """Columns of ``length`` records from ``start``; of all to the end where it is None.

        Raises:
            StoreError: the record table is damaged.
        """


@dataclass(frozen=True)
class Held:
    """Records in memory."""

    frame: pl.DataFrame

    @property
    def height(self) -> int:
        return self.frame.height

    @property
    def names(self) -> pl.Series:
        return self.frame.get_column("name")

    def rows(
        self, columns: Sequence[str], start: int = 0, length: int | None = None
    ) -> pl.DataFrame:
        return self.frame.select(columns).slice(start, length)


@dataclass(frozen=True)
class Stored:
    """Records that stand together in a record table, read when they are asked for."""

    path: Path
    lazy: pl.LazyFrame
    #: Number of their first row.
    first: int
    height: int

    @cached_property
    def names(self) -> pl.Series:
        return self._read(["name"], 0, self.height).get_column("name")

    def rows(
        self, columns: Sequence[str], start: int = 0, length: int | None = None
    ) -> pl.DataFrame:
        rest = max(0, self.height - start)
        length = rest if length is None else min(length, rest)
        # names are the costliest column to decode and were looked at already
        known = "names" in self.__dict__ and "name" in columns
        if not known:
            return self._read(columns, start, length)
        frame = self._read([name for name in columns if name != "name"], start, length)
        return frame.with_columns(self.names.slice(start, length)).select(columns)

    def _read(self, columns: Sequence[str], start: int, length: int) -> pl.DataFrame:
        try:
            return self.lazy.slice(self.first + start, length).select(columns).collect()
        except UNREADABLE as error:
            raise StoreError(f"{self.path} is not a readable record table: {error}") from error
