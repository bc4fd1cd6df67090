"""The same record in every micro-batch: a law is one only if it holds in all of them."""

from __future__ import annotations

import polars as pl

from rlprobe.judge.analysis import Finding
from rlprobe.judge.row import Row, each

#: What tells a record from others of its micro-batch.
_SAME = ("rank", "phase", "module", "op", "slot", "index")


def rows(finding: Finding, row: Row) -> list[Row]:
    """The record in all micro-batches that are judged and where it differs; the row is one."""
    table = finding.stage.rows
    same = pl.col("judged") & pl.col("beyond")
    for name in (name for name in _SAME if name in table.columns):
        same &= pl.col(name).eq_missing(pl.lit(row.get(name), table.schema[name]))
    return each(table.filter(same).sort("micro_batch")) or [row]
