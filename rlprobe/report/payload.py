"""What the page's scripts show: records, curves and stacks, as compressed columns.

``gzip``, then base64, so that nothing in it can be taken for markup; a browser unpacks it with
``DecompressionStream``. Texts are indices into a list of distinct ones. Numbers have four
significant digits: the tables beside the page have them all.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from rlprobe.judge import extent
from rlprobe.report import narrowed
from rlprobe.report.narrowed import Narrowed

#: More records than this are aggregated: each record's worst rank, then those that say most.
MOST = 120_000
_DIGITS = 4
_TEXTS = (
    "stage", "name", "name_target", "module", "op", "slot", "index", "direction", "status",
    "reason",
    "dtype_benchmark", "dtype_target", "shape_benchmark", "shape_target", "error_kind",
    "excused_by", "unjudged_because",
)  # fmt: skip
_WHOLE = ("step", "rank", "order", "micro_batch", "sequence", "call", "update")
_NUMBERS = ("error", "floor", "excess", "R", "norm_benchmark", "norm_target")
_FLAGS = ("judged", "beyond")


@dataclass(frozen=True)
class Records:
    """The records of all stages, and how many there were before any were left out."""

    rows: pl.DataFrame
    total: int

    @property
    def aggregated(self) -> bool:
        return self.rows.height < self.total


def records(
    judged: Narrowed, stages: Sequence[str], most: int = MOST, first: pl.Expr = narrowed.NOTHING
) -> Records:
    """The judged tables of an alignment, aggregated where they are too many for a page.

    Args:
        judged: the tables.
        stages: of which there are any.
        most: records that a page holds.
        first: the record that the page leads to, by ``stage``, ``step``, ``rank`` and ``name``: it
            stays, however much worse others are.

    Raises:
        DumpError: a table is damaged.
    """
    parts = []
    total = 0
    for stage in stages:
        part = judged.part(stage)
        table = part.rows.with_columns(stage=pl.lit(stage))
        table = table.filter(~extent.absent(table))
        total += part.total
        if part.narrowed or table.height > most // max(1, len(stages)):
            table = narrowed.in_order(narrowed.worst_of_ranks(table, first))
        parts.append(table.with_columns(_shape("shape_benchmark"), _shape("shape_target")))
    if not parts:
        return Records(pl.DataFrame(), 0)
    rows = pl.concat(parts, how="diagonal_relaxed")
    return Records(_telling(rows, most, first), total)


def _shape(name: str) -> pl.Expr:
    text = pl.format("[{}]", pl.col(name).cast(pl.List(pl.String)).list.join(", "))
    return pl.when(pl.col(name).is_not_null()).then(text).alias(name)


def _telling(rows: pl.DataFrame, most: int, first: pl.Expr) -> pl.DataFrame:
    """The first divergence, what is beyond its floor, what has no partner, then the nearest."""
    if rows.height <= most:
        return rows
    alone = pl.col("status").is_in(["benchmark_only", "target_only"])
    weight = pl.when(first).then(3).when(pl.col("beyond")).then(2).when(alone).then(1).otherwise(0)
    numbered = rows.with_row_index("_row").with_columns(_weight=weight)
    kept = numbered.sort("_weight", "excess", descending=True, nulls_last=True).head(most)
    return kept.sort("_row").drop("_row", "_weight")


def pack(found: Records, **more: Any) -> str:
    """The payload: records and whatever else the scripts need, base64 of gzipped JSON."""
    content = {"records": _columns(found), **more}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # no time in the header: the same results make the same page
    packed = gzip.compress(text.encode("utf-8", "replace"), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _columns(found: Records) -> dict[str, Any]:
    rows = found.rows
    columns: dict[str, Any] = {}
    for name in _TEXTS:
        columns[name] = _indexed(rows, name)
    for name in _WHOLE:
        columns[name] = _given(rows, name).to_list() if rows.width else []
    for name in _NUMBERS:
        columns[name] = [rounded(v) for v in _given(rows, name).to_list()] if rows.width else []
    for name in _FLAGS:
        columns[name] = [int(bool(v)) for v in _given(rows, name).to_list()] if rows.width else []
    return {"count": rows.height, "total": found.total, "columns": columns}


def _given(rows: pl.DataFrame, name: str) -> pl.Series:
    if name in rows.columns:
        return rows.get_column(name)
    return pl.Series(name, [None] * rows.height)


def _indexed(rows: pl.DataFrame, name: str) -> dict[str, Any]:
    """``of``: the distinct texts; ``at``: an index into them per row, -1 for none."""
    if not rows.width or name not in rows.columns:
        return {"of": [], "at": [-1] * rows.height}
    texts = rows.get_column(name).cast(pl.String)
    distinct = texts.drop_nulls().unique(maintain_order=True)
    numbers = {text: number for number, text in enumerate(distinct.to_list())}
    return {
        "of": list(numbers),
        "at": [-1 if text is None else numbers[text] for text in texts.to_list()],
    }


def rounded(value: float | None) -> float | str | None:
    """Four significant digits; what is not finite as text, since JSON has no number for it."""
    if value is None:
        return None
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return float(f"{value:.{_DIGITS}g}")
