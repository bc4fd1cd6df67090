"""Which record of one side is which of the other, within one process.

Every record of both sides ends up in exactly one row. Records of the same name come first; what is
left is matched by rules (:mod:`rlprobe.compare.rules`), each on the leftovers of the one before.
All of it is joins and sorts: n log n at worst.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

#: What identifies a record on both sides once wrappers are out of its module path.
KEY = ("module", "op", "call", "direction", "slot", "index")
#: The rule's name where only wrapper components or class prefixes differ.
WRAPPERS = "wrappers"


@dataclass(frozen=True)
class Matches:
    """Row numbers of both sides, a row per pair or single record.

    ``benchmark`` and ``target`` are null where the record is on the other side only; ``rule`` is
    null where the names are the same.
    """

    benchmark: pl.Series
    target: pl.Series
    rule: pl.Series

    def __len__(self) -> int:
        return len(self.rule)


def same_names(benchmark: pl.DataFrame, target: pl.DataFrame) -> bool:
    """Whether both sides hold the same records in the same order, the usual case."""
    if benchmark.height != target.height:
        return False
    return bool((benchmark.get_column("name") == target.get_column("name")).all())


def match(benchmark: pl.DataFrame, target: pl.DataFrame) -> Matches:
    """Pair the records of two processes.

    Both frames hold at least ``name`` and the columns of :data:`KEY`, in execution order.
    """
    left, right = _keyed(benchmark), _keyed(target)
    joined = left.join(
        right, on=["number", *KEY], how="full", nulls_equal=True, suffix="_target", coalesce=True
    )
    rows = joined.select(
        benchmark="row",
        target="row_target",
        rule=pl.when(_plain("name") != _plain("name_target")).then(pl.lit(WRAPPERS)),
    )
    return Matches(*rows.get_columns())


def _plain(column: str) -> pl.Expr:
    """msprobe calls a keyword argument ``kwargs.x`` in one task and ``input.x`` in the other."""
    return pl.col(column).str.replace(".kwargs.", ".input.", literal=True)


def _keyed(frame: pl.DataFrame) -> pl.DataFrame:
    """Row numbers, and an occurrence number where wrappers leave several records of one key."""
    return frame.select(
        pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"),
        "name",
        *KEY,
        number=pl.int_range(pl.len(), dtype=pl.UInt32).over(list(KEY)),
    )
