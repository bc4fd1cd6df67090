"""Judged tables as a page can hold them: of many ranks the worst of each record.

A table of a few ranks is read whole. A larger one is read piece by piece, and of each record the
rank that is worst is kept, all of the rank where the first divergence is, and key data; how many
records there were, and the worst of every rank and step, are counted over all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.errors import DumpError
from rlprobe.judge import extent, tables
from rlprobe.judge.inputs import Results

#: Rows that are read whole.
WHOLE = 120_000
#: Rows of a piece: Parquet's row group, so that none is read twice.
PIECE = 1 << 18
#: What a record is, whatever its rank.
IDENTITY = ("step", "name", "slot", "index")
#: No row.
NOTHING = pl.lit(False)


@dataclass(frozen=True)
class Part:
    """One stage's judged table."""

    rows: pl.DataFrame
    #: Records before any were left out; arguments that neither side has are none.
    total: int
    #: ``rank``, ``step``, ``update`` and the largest ``excess`` that was judged there, null where
    #: none was.
    places: pl.DataFrame
    #: Whether records were left out.
    narrowed: bool


class Narrowed:
    """The judged tables of an alignment, each narrowed once.

    Args:
        results: the alignment.
        rank: whose records are kept whole; None: nobody's.
        whole: rows that a table may have without being narrowed.
    """

    def __init__(self, results: Results, rank: int | None, whole: int = WHOLE) -> None:
        self._results = results
        self._rank = rank
        self._whole = whole
        self._parts: dict[str, Part] = {}

    def part(self, stage: str) -> Part:
        """A stage's table.

        Raises:
            DumpError: it is damaged.
        """
        if stage not in self._parts:
            self._parts[stage] = self._read(stage)
        return self._parts[stage]

    def rows(self, stage: str) -> pl.DataFrame:
        """Its rows, for :func:`rlprobe.judge.tables.read`."""
        return self.part(stage).rows

    def _read(self, stage: str) -> Part:
        lazy, height = tables.scan_table(self._results, stage)
        if height <= self._whole:
            table = tables.read_table(self._results, stage)
            return Part(table, _present(table), _places(table), False)
        kept = pl.DataFrame(schema=tables.SCHEMA)
        whole: list[pl.DataFrame] = []
        places: list[pl.DataFrame] = []
        total = 0
        try:
            for begin in range(0, height, PIECE):
                piece = lazy.slice(begin, PIECE).collect()
                total += _present(piece)
                places.append(_places(piece))
                own = (pl.col("slot") == tables.KEY_DATA) | (
                    pl.lit(False) if self._rank is None else pl.col("rank") == self._rank
                ).fill_null(False)
                whole.append(piece.filter(own))
                kept = worst_of_ranks(pl.concat([kept, piece.filter(~own)]))
        except UNREADABLE as error:
            raise DumpError(
                f"the judged table of {stage} is not readable: {error}; run "
                "`rlprobe diagnose RESULTS_DIR` again"
            ) from error
        rows = pl.concat([*whole, kept])
        return Part(in_order(rows), total, _places_of(places), True)


def worst_of_ranks(table: pl.DataFrame, first: pl.Expr = NOTHING) -> pl.DataFrame:
    """Of each record the rank that is worst; what is beyond its floor comes before any ratio.

    Args:
        table: judged rows.
        first: rows that are taken whatever another rank's are.
    """
    by = ["_first", "beyond", "excess"]
    ranked = table.with_columns(_first=first.fill_null(False)).sort(
        by, descending=True, nulls_last=True, maintain_order=True
    )
    return ranked.unique(list(IDENTITY), keep="first", maintain_order=True).drop("_first")


def in_order(table: pl.DataFrame) -> pl.DataFrame:
    """Rows in the order of their execution."""
    return table.sort("step", "sequence", "order", nulls_last=True, maintain_order=True)


def _present(table: pl.DataFrame) -> int:
    return table.height - int(extent.absent(table).sum())


def _places(table: pl.DataFrame) -> pl.DataFrame:
    judged = pl.when(pl.col("judged")).then(pl.col("excess"))
    return table.group_by("rank", "step", "update").agg(judged.max().alias("excess"))


def _places_of(parts: list[pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(parts).group_by("rank", "step", "update").agg(pl.col("excess").max())
