"""What a call whose output parts first was given, and how closely that is known to agree.

That all before it agrees is what the order of execution says of records that were measured. Of its
own inputs some may not have been recorded, some not measured, and of whole numbers statistics know
the largest and the smallest alone: whoever looks for the fault has to be told.
"""

from __future__ import annotations

import polars as pl

from rlprobe.compare import measures
from rlprobe.judge import equipped
from rlprobe.judge.row import Row
from rlprobe.said import Said, say

#: Inputs that are named; more are counted by whoever looks at the records.
_NAMED = 3


def agreeing(row: Row, rows: pl.DataFrame) -> Said:
    """How far the inputs of an output's call are known to agree.

    Args:
        row: the output that parts first.
        rows: of its process.
    """
    inputs = rows.filter(
        (pl.col("call_id") == row["call_id"])
        & (pl.col("slot") == "input")
        & (pl.col("dtype_benchmark").is_not_null() | pl.col("dtype_target").is_not_null())
    )
    if inputs.is_empty():
        return say("the output differs; no input of the call was recorded")
    unmeasured = inputs.filter(pl.col("error").is_null())
    tensors = inputs.filter(pl.col("shape_benchmark").is_not_null())
    by_statistics = tensors.filter(pl.col("error_kind") == measures.STATISTIC)
    if unmeasured.height == inputs.height:
        return say("the output differs; of what the call was given nothing was measured")
    if unmeasured.height:
        return say(
            "what was measured of the inputs agrees within noise and the output does not; "
            "{slots} was not measured",
            slots=_slots(unmeasured),
        )
    whole = by_statistics.filter(equipped.whole_numbers())
    if whole.height:
        return say(
            "inputs agree as far as statistics see and the output does not; of the whole numbers "
            "in {slots} they know the largest and the smallest alone: other ids of tokens between "
            "these are not seen",
            slots=_slots(whole),
        )
    if by_statistics.height:
        return say("inputs agree within noise as far as statistics see, and the output does not")
    return say("inputs agree within noise and the output does not")


def differing_parameter(module: str | None, rows: pl.DataFrame) -> str | None:
    """The first parameter of a module itself that the sides were given unlike; None of none."""
    own = equipped.differing(equipped.parameters(rows).filter(pl.col("module") == module))
    return None if own.is_empty() else str(own.item(0, "name"))


def _slots(inputs: pl.DataFrame) -> str:
    named = [
        f"{slot}.{index}" if index else slot
        for slot, index in inputs.select("slot", "index").head(_NAMED).iter_rows()
    ]
    more = inputs.height - len(named)
    return ", ".join(named) + (f" (+{more})" if more > 0 else "")
