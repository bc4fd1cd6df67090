"""Functions that decide, or divide, where round-off may fall either way.

A comparison, a sorting, a rounding or a sign makes whole numbers of floats. Of floats that are
apart by round-off some fall on the other side, and what comes out differs by one, by an index or by
a sign, of which there is no round-off. So it says nothing where what the call was given differs at
all, and what is made of it is judged later on; given the same bits, it is judged itself.

So does rounding to a format of a few numbers, FP4 or the power of two that scales a block of them:
what a call makes in one, given floats that differ, and what a call is given in one after floats
that differ. A tipped scale halves or doubles its whole block. Parameters are not excused, which
were rounded before.

Adam's update divides a mean of gradients by the root of their mean square: at the first step that
is the sign of each gradient. Of a share e of elements that are smaller than their own round-off e,
half change their sign, which makes ``2 sqrt(e)`` of the whole.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import DECISION
from rlprobe.judge.roundoff import DECIDED, UNIT

#: Functions without their kind and without underscores around them.
_DECIDES = (
    "gt", "lt", "ge", "le", "eq", "ne", "greater", "less", "greater_equal", "less_equal",
    "not_equal", "argmax", "argmin", "argsort", "sort", "topk", "max", "min", "kthvalue", "mode",
    "median", "nonzero", "searchsorted", "bucketize", "unique", "sign", "sgn", "signbit", "round",
    "floor", "ceil", "trunc", "fix", "frac", "floor_divide", "remainder", "fmod", "heaviside",
    "int", "long", "bool", "isclose", "allclose", "multinomial",
)  # fmt: skip
#: Of these the result itself is a float.
_STEPS = (
    "sign", "sgn", "round", "floor", "ceil", "trunc", "fix", "frac", "floor_divide", "remainder",
    "fmod", "heaviside",
)  # fmt: skip
_DIVIDES = ("addcdiv",)


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out decisions about numbers that differ, and hold quotients against wider floors.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    function = pl.col("module").is_null() & (pl.col("direction") == "forward")
    name = pl.col("op").str.splitn(".", 2).struct.field("field_1").str.strip_chars("_")
    number = [pl.col(f"dtype_{side}").is_in(list(UNIT)) for side in ("benchmark", "target")]
    floats = pl.all_horizontal(number).fill_null(False)
    given = (pl.col("slot") == "input") & floats
    apart = (given & (pl.col("error") != 0).fill_null(True)).any().over("call_id")
    few = pl.all_horizontal(
        pl.col(f"dtype_{side}").is_in(DECIDED) for side in ("benchmark", "target")
    ).fill_null(False)
    earlier = (floats & ~few & (pl.col("error") > 0).fill_null(False)).cum_max()
    rounded = few & (
        ((pl.col("slot") == "output") & apart) | ((pl.col("slot") == "input") & earlier)
    )
    made = (pl.col("slot") == "output") & function
    decided = (made & name.is_in(_DECIDES) & (~floats | name.is_in(_STEPS)) & apart) | rounded
    divided = made & name.is_in(_DIVIDES) & apart
    found = []
    if rows.select((decided & (pl.col("error") > 0)).any()).item():
        found.append(Excuse(DECISION, decided & (pl.col("error") > 0)))
    if rows.select(divided.any()).item():
        found.append(Excuse(DECISION, divided, floor=2 * pl.col("floor").sqrt()))
    return found
