"""Gradients and changes that are zero on both sides: 0 = 0 says nothing.

One table says where zero may be right (:data:`ZERO`). Gradients that are zero in *all* records of a
kind, micro-batches and parameters alike, mean that nothing was learnt: all advantages are equal, a
mask is empty, or a framework records a placeholder. Two devices agree on that whatever their
backward passes compute.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge import execution
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import ALL_ZERO

_GRADIENT = "a parameter that nothing reached: an expert without tokens, LoRA's A while B is zero"
#: Kind of record -> when one of them may be zero; all of them at once never are.
ZERO: dict[str, str] = {
    "backward": "a gradient that stops: a frozen branch, a token that is masked",
    "grad": _GRADIENT,
    "grad_reduced": _GRADIENT,
    "grad_clipped": _GRADIENT,
    "change": "a frozen parameter, or one whose gradient is zero",
}


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out the kinds of an update that are zero in every record of both sides.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    flows = (pl.col("phase") == execution.BACKWARD) & (pl.col("slot") != "grad")
    kind = pl.when(flows).then(pl.lit("backward")).otherwise("slot")
    measured = rows.filter(
        pl.col("judged") & pl.col("norm_benchmark").is_not_null() & kind.is_in(list(ZERO))
    )
    zero = (pl.col("norm_benchmark") == 0) & (pl.col("norm_target") == 0)
    found = (
        measured.group_by("update", kind.alias("kind"))
        .agg(zero.fill_null(False).all().alias("zero"))
        .filter("zero")
        .sort("update", "kind")
    )
    return [
        Excuse(ALL_ZERO, (pl.col("update") == update) & (kind == name))
        for update, name in found.select("update", "kind").iter_rows()
    ]
