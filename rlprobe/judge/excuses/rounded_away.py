"""Changes that are smaller than what the weights they were read off can hold.

A weight of 16 bits keeps no change below half a unit in its last place: near 1, a bf16 weight takes
steps of 0.004 and 0.008. What an update does to it can then not be seen, whatever the devices
compute (:mod:`rlprobe.judge.kept`).
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.kept import COLUMN
from rlprobe.judge.noise_updates import CHANGE, GRADIENTS
from rlprobe.judge.reasons import ROUNDED_AWAY


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out changes that rounding the weights could have made, or have hidden, in full.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    known = pl.col(COLUMN) if COLUMN in rows.columns else pl.lit(None, pl.Float64)
    both = pl.max_horizontal("norm_benchmark", "norm_target")
    hidden = (pl.col("slot") == CHANGE) & (both <= updates(rows) * known)
    if not rows.select(hidden.fill_null(False).any()).item():
        return []
    return [Excuse(ROUNDED_AWAY, hidden)]


def updates(rows: pl.DataFrame) -> int:
    """Updates that a change is of, each of which rounds the weights."""
    gradients = rows.filter(pl.col("slot").is_in(GRADIENTS)).get_column("call").n_unique()
    changes = rows.filter(pl.col("slot") == CHANGE).get_column("call").n_unique()
    return max(1, gradients) if changes == 1 else 1
