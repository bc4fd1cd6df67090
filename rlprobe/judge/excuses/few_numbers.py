"""A record of a few numbers, of which most cancelled in one call.

Round-off of a sum is relative to what is summed. Of many numbers the norm is of that size; a single
one, as a gate gives for one decoded token, may come out near zero by chance, and the same round-off
is then a large part of it. So a record of a few numbers is held against its size in all its calls
of the stage: the root mean square of a number, on the benchmark.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge import execution
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import FEW_NUMBERS

#: Numbers of a record, from which on chance does not make its norm small.
_FEW = 8
_CALLS = ("module", "op", "slot", "index")


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Widen the floors of small records that came out smaller than they usually do.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    wider = cancelled()
    mine = (
        (pl.col("phase") == execution.FORWARD)
        & pl.col("module").is_not_null()
        & pl.col("slot").is_in(["input", "output"])
        & (wider > 1)
        & (pl.col("error") > pl.col("floor"))
    ).fill_null(False)
    if not rows.select(mine.any()).item():
        return []
    return [Excuse(FEW_NUMBERS, mine, floor=pl.col("floor") * wider)]


def cancelled() -> pl.Expr:
    """By how much a record of a few numbers came out smaller than it usually does; 1 for others.

    Of rows with the columns of a comparison, all calls of a stage.
    """
    size = pl.col("shape_benchmark").list.eval(pl.element().product()).list.first().fill_null(1)
    number = pl.col("norm_benchmark") / size.sqrt()
    usual = number.pow(2).mean().over(*_CALLS).sqrt()
    few = pl.col("shape_benchmark").is_not_null() & (size <= _FEW) & (number > 0)
    return pl.when((few & (number < usual)).fill_null(False)).then(usual / number).otherwise(1.0)
