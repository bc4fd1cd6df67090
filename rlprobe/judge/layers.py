"""Layers that ran in another process: round-off does not begin anew at a pipeline stage.

A process of a pipeline records its own layers only; what reaches its first one has come through all
layers before it. Layers are alike, so those that are elsewhere are taken to add what the ones here
add.
"""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

_LAYER = r"\.layers\.(\d+)(?:\.|$)"


def number() -> pl.Expr:
    """Of the layer that a row's module is in, counted from 0 over the whole model; null outside."""
    return pl.col("module").str.extract(_LAYER).cast(pl.Int64)


def distinct(table: pl.DataFrame) -> set[int]:
    """Numbers of the layers in a table with the column ``_layer``."""
    return set(table.get_column("_layer").drop_nulls().unique())


def of(rows: pl.DataFrame) -> set[int]:
    """Numbers of the layers that rows are of."""
    return distinct(rows.select(_layer=number()))


def apart(processes: Iterable[pl.DataFrame]) -> bool:
    """Whether processes hold different layers: a pipeline's do."""
    held = [of(rows) for rows in processes]
    return any(one != held[0] for one in held)


def elsewhere(table: pl.DataFrame, every: set[int]) -> pl.DataFrame:
    """``S`` with what the layers of other processes added before a row.

    Args:
        table: rows of one process, in order, with ``_layer``, ``direction``, ``own``,
            ``micro_batch`` and ``S`` (see :mod:`rlprobe.judge.noise`).
        every: numbers of the layers on all processes of the stage.
    """
    here = distinct(table)
    if not here or here == every:
        return table
    forward = table.filter(pl.col("direction") == "forward", pl.col("_layer").is_not_null())
    passed = forward.select("micro_batch", "_layer").n_unique()
    each = float(forward.get_column("own").sum()) / max(passed, 1)
    # behind the last layer come a norm and the head
    at = pl.col("_layer").forward_fill().over("micro_batch", "direction")
    ahead = pl.when(pl.col("_layer").is_null()).then(at + 1).otherwise(at).fill_null(0)
    behind = pl.lit(2 * len(every) - 1) - at.fill_null(max(every))
    depth = pl.when(pl.col("direction") == "backward").then(behind).otherwise(ahead)
    return table.with_columns(
        S=pl.when(pl.col("S").is_not_null()).then(pl.max_horizontal("S", depth * each))
    )
