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
    shape = pl.col("shape_benchmark")
    size = shape.list.eval(pl.element().product()).list.first().fill_null(1)
    number = pl.col("norm_benchmark") / size.sqrt()
    usual = number.pow(2).mean().over(*_CALLS).sqrt()
    mine = (
        (pl.col("phase") == execution.FORWARD)
        & pl.col("module").is_not_null()
        & pl.col("slot").is_in(["input", "output"])
        & shape.is_not_null()
        & (size <= _FEW)
        & (number > 0)
        & (number < usual)
        & (pl.col("error") > pl.col("floor"))
    ).fill_null(False)
    if not rows.select(mine.any()).item():
        return []
    return [Excuse(FEW_NUMBERS, mine, floor=pl.col("floor") * usual / number)]
