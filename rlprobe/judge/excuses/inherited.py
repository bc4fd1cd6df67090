"""Losses and gradients that differ by what the stage was given.

How much that may be: :mod:`rlprobe.judge.propagated`. The floor with it is the wider one; a record
that is within it alone agrees, on the ground that another stage's noise came in.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import INHERITED

FLOOR, EXCESS = "inherited_floor", "inherited_excess"


def with_own(rows: pl.DataFrame, own: pl.DataFrame | None) -> pl.DataFrame:
    """Rows whose ``floor`` and ``excess`` are their own, what is inherited beside them.

    Args:
        rows: floors with what is inherited.
        own: the same rows' floors without; None where nothing is inherited.
    """
    if own is None:
        return rows
    return rows.with_columns(
        own.get_column("floor"),
        own.get_column("excess"),
        rows.get_column("floor").alias(FLOOR),
        rows.get_column("excess").alias(EXCESS),
    )


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """A wider floor where one is inherited."""
    if FLOOR not in rows.columns:
        return []
    wider = (pl.col(FLOOR) != pl.col("floor")) | (pl.col(EXCESS) != pl.col("excess"))
    return [Excuse(INHERITED, wider, pl.col(FLOOR), pl.col(EXCESS))]
