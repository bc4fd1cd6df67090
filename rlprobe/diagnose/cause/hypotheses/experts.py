"""Tokens are sent to other experts, or experts weighed otherwise.

What a router hands out makes it one, whatever its name and whatever the order: scores or weights
beside a choice, in whole numbers or truth values. transformers' routers hand out (logits, scores,
indices) or (scores, indices) by version, Megatron's (scores, map).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge.row import Row
from rlprobe.said import NOTHING_SAID, Said, joined, say

_WHOLE = re.compile(r"torch\.(u?int|long|short|bool)")
_ROUTER = re.compile(r"router|gate$|topk|moe|expert", re.IGNORECASE)


def is_choice(dtype: object) -> bool:
    """Whether a format is one of choices: whole numbers, truth values."""
    return _WHOLE.match(str(dtype)) is not None


def may_route(what: str) -> bool:
    """Whether a module's name says that a look is worth while."""
    return _ROUTER.search(what) is not None


class Choice:
    """A router's choice, or its weights beside a choice, differ."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """What the record is among the call's outputs."""
        row = difference.row
        operator = str(row.get("op"))
        if row.get("slot") not in ("output", "input") or not may_route(
            f"{operator} {str(row.get('module')).rpartition('.')[2]}"
        ):
            return None
        index, chosen = str(row.get("index")), is_choice(row.get("dtype_benchmark"))
        others = [each for each in difference.siblings if each.get("index") != row.get("index")]
        if chosen:
            said = say(
                "{operator} chose other experts: its {slot} {index}, whole numbers, differs",
                operator=operator,
                slot=row["slot"],
                index=index,
            )
            return Fit("routing", (said + _said(others),))
        choices = [each for each in others if is_choice(each.get("dtype_benchmark"))]
        if row["slot"] != "output" or not choices or index == "0":
            return None  # the first output is what everything else is made of
        if any(each.get("beyond") for each in choices):
            said = say(
                "{operator} chose other experts: its output {index} differs",
                operator=operator,
                index=index,
            )
        else:
            said = say(
                "{operator} weighs experts otherwise: its output {index}, scores or "
                "weights, differs",
                operator=operator,
                index=index,
            )
        return Fit("routing", (said + _said(others),))


def _said(others: Sequence[Row]) -> Said:
    """What is to be said of the call's other outputs."""
    said: dict[bool, list[Said]] = {True: [], False: []}
    for each in others:
        kind = (
            say("the choice, whole numbers")
            if is_choice(each.get("dtype_benchmark"))
            else (say("scores or weights"))
        )
        said[bool(each.get("beyond"))].append(
            say("{index} ({kind})", index=each.get("index"), kind=kind)
        )
    text = NOTHING_SAID
    if said[True]:
        also = joined(said[True], say(" and "))
        text += say("; of its other outputs, {outputs} differ too", outputs=also)
    if said[False]:
        agree = joined(said[False], say(" and "))
        text += say("; of its other outputs, {outputs} agree", outputs=agree)
    return text
