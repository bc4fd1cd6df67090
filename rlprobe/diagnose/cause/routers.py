"""Causes where tokens are sent to experts: the choice, its weights, and what experts do with them.

What a router hands out is told apart by what it is, not by its place: transformers' routers hand
out (logits, scores, indices) or (scores, indices) by version, Megatron's (scores, map). Whole
numbers and truth values are a choice, other numbers logits or weights.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from rlprobe.diagnose.cause.found import Found, unknown
from rlprobe.judge import execution
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import Finding
from rlprobe.judge.origin import Origin

_WHOLE = re.compile(r"torch\.(u?int|long|short|bool)")


def cause(finding: Finding, origin: Origin, operator: str) -> Found | None:
    """The cause where one of several outputs of a router parts first; None where it is none."""
    row = origin.row
    index, dtype = str(row.get("index")), row.get("dtype_benchmark")
    if _is_choice(dtype):
        said = f"{operator} chose other experts: its {row['slot']} {index}, whole numbers, differs"
        return Found("routing", [said + _others(finding, row)])
    if row["slot"] != "output" or index == "0":
        return None
    others = _others(finding, row)
    if any(_is_choice(other) for _, other, beyond in _outputs(finding, row) if beyond):
        return Found(
            "routing", [f"{operator} chose other experts: its output {index} differs{others}"]
        )
    said = f"{operator} weighs experts otherwise: its output {index}, scores or weights, differs"
    return Found("routing", [said + others])


def output(finding: Finding, origin: Origin, operator: str) -> Found:
    """The cause where what a router or its experts make parts by no simple law."""
    row = origin.row
    if origin.kind == kinds.GLUE and _agrees(finding, origin):
        return unknown(
            f"what {operator} hands to {row.get('module') or row.get('op')} differs, and its own "
            "output agrees: to no effect on it"
        )
    made = "output" if origin.kind == kinds.MODULE else f"{row['slot']} of {row.get('op')} inside"
    chosen = _inputs_whole(finding, origin)
    if chosen:
        said = f"the choice of experts that {operator} was given agrees, and its {made} differs"
        return unknown(said)
    return unknown(f"{operator} routes tokens to experts, and its {made} differs")


def _is_choice(dtype: object) -> bool:
    return _WHOLE.match(str(dtype)) is not None


def _others(finding: Finding, row: dict[str, Any]) -> str:
    """What is to be said of the call's other outputs."""
    said: dict[bool, list[str]] = {True: [], False: []}
    for index, dtype, beyond in _outputs(finding, row):
        kind = "the choice, whole numbers" if _is_choice(dtype) else "scores or weights"
        said[beyond].append(f"{index} ({kind})")
    parts = [
        f"; of its other outputs, {' and '.join(said[beyond])} {verb}"
        for beyond, verb in ((True, "differ too"), (False, "agree"))
        if said[beyond]
    ]
    return "".join(parts)


def _outputs(finding: Finding, row: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The other outputs of a record's call: index, dtype and whether it differs."""
    if "call_id" not in row:
        return []
    found = finding.stage.rows.filter(
        (pl.col("call_id") == row["call_id"])
        & (pl.col("rank") == row.get("rank"))
        & (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "output")
        & (pl.col("index") != row["index"])
        & pl.col("error").is_not_null()
    )
    return found.select("index", "dtype_benchmark", pl.col("beyond").fill_null(False)).rows()


def _inputs_whole(finding: Finding, origin: Origin) -> bool:
    """Whether the module was given a choice of experts, which agrees as its inputs do."""
    row = origin.row
    table = finding.stage.rows
    if "micro_batch" not in row or table.is_empty():
        return False
    given = table.filter(
        (pl.col("module") == origin.module)
        & (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "input")
    ).get_column("dtype_benchmark")
    return any(_is_choice(dtype) for dtype in given.to_list())


def _agrees(finding: Finding, origin: Origin) -> bool:
    """Whether the enclosing module's own outputs agree although something inside differs."""
    row = origin.row
    own = finding.stage.rows.filter(
        (pl.col("module") == origin.module)
        & (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("rank") == row.get("rank"))
        & (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "output")
        & pl.col("error").is_not_null()
    )
    return own.height > 0 and not own.get_column("beyond").any()
