"""Tokens are sent to other experts, or experts weighed otherwise.

What a router hands out makes it one, whatever its name and whatever the order: scores or weights
beside a choice, in whole numbers or truth values. transformers' routers hand out (logits, scores,
indices) or (scores, indices) by version, Megatron's (scores, map).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit

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
            said = (
                f"{operator} chose other experts: its {row['slot']} {index}, whole numbers, differs"
            )
            return Fit("routing", (said + _said(others),))
        choices = [each for each in others if is_choice(each.get("dtype_benchmark"))]
        if row["slot"] != "output" or not choices or index == "0":
            return None  # the first output is what everything else is made of
        if any(each.get("beyond") for each in choices):
            said = f"{operator} chose other experts: its output {index} differs"
        else:
            said = (
                f"{operator} weighs experts otherwise: its output {index}, scores or weights, "
                "differs"
            )
        return Fit("routing", (said + _said(others),))


def _said(others: Sequence[dict[str, Any]]) -> str:
    """What is to be said of the call's other outputs."""
    said: dict[bool, list[str]] = {True: [], False: []}
    for each in others:
        kind = "the choice, whole numbers" if is_choice(each.get("dtype_benchmark")) else (
            "scores or weights"
        )  # fmt: skip
        said[bool(each.get("beyond"))].append(f"{each.get('index')} ({kind})")
    parts = [
        f"; of its other outputs, {' and '.join(said[beyond])} {verb}"
        for beyond, verb in ((True, "differ too"), (False, "agree"))
        if said[beyond]
    ]
    return "".join(parts)
