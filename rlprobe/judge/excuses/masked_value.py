"""Additive masks that say "never" with another number, and mask the same.

A mask is added to attention's scores: 0 where a token is seen, a number far below any score where
it is not. Which number is a matter of the kernel's format and of who wrote the mask: -10000,
-65504, -1e9, the lowest number of fp32. The softmax makes 0 of each, so that two correct devices
may differ by all of a mask's norm and in nothing that follows.

- **Is it such a mask on both sides?** Its largest element is 0, its smallest at -10000 or below:
  the exponential of that is 0 in every format.
- **Does it mask the same share?** The mean over the smallest is the share of masked tokens, if all
  of these hold one number; it must agree.
- **The same tokens?** The innermost call that was given it agrees in all that it hands on, which it
  does not where other tokens are masked.

Then a mask of these numbers is excused in its micro-batch, wherever it is handed on. Where the
call does not agree, or hands on nothing that was measured, the mask is judged as it is.
"""

from __future__ import annotations

import polars as pl

from rlprobe.judge.excuse import Excuse
from rlprobe.judge.reasons import MASKED_VALUE

#: From here on down an element of a mask says never: e**-10000 is 0, whatever score is added.
NEVER = -1e4
#: Shares of masked elements are of means, which are rounded.
_SAME_SHARE = 1e-4
_SIDES = ("benchmark", "target")
#: What tells a mask from another one of its micro-batch.
_NUMBERS = tuple(f"{name}_{side}" for name in ("min", "mean") for side in _SIDES)


def excuses(rows: pl.DataFrame) -> list[Excuse]:
    """Leave out masks of other numbers whose first use agrees.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
    """
    found = []
    masks = rows.filter(pl.col("judged") & pl.col("beyond") & _is_mask())
    for (micro_batch, *numbers), mask in masks.group_by(
        "micro_batch", *_NUMBERS, maintain_order=True
    ):
        here = pl.col("micro_batch") == micro_batch
        if _agrees(rows.filter(here), mask.get_column("call_id")):
            same = (pl.col(name) == value for name, value in zip(_NUMBERS, numbers, strict=True))
            found.append(Excuse(MASKED_VALUE, here & _is_mask() & pl.all_horizontal(*same)))
    return found


def _is_mask() -> pl.Expr:
    """Inputs that are masks on both sides, and mask the same share."""
    sides = [(pl.col(f"max_{side}") == 0) & (pl.col(f"min_{side}") <= NEVER) for side in _SIDES]
    shares = [pl.col(f"mean_{side}") / pl.col(f"min_{side}") for side in _SIDES]
    return (
        (pl.col("slot") == "input")
        & (pl.col("status") == "matched")
        & pl.all_horizontal(*sides)
        & ((shares[1] - shares[0]).abs() <= _SAME_SHARE * shares[0])
    ).fill_null(False)


def _agrees(rows: pl.DataFrame, calls: pl.Series) -> bool:
    """Whether the first of some calls to complete agrees in all that it hands on."""
    results = rows.filter(
        pl.col("judged")
        & pl.col("error").is_not_null()
        & (pl.col("slot") == "output")
        & pl.col("call_id").is_in(calls.implode())
    ).sort("sequence")
    if results.is_empty():
        return False
    first = results.filter(pl.col("call_id") == results.item(0, "call_id"))
    return not first.get_column("beyond").any()
