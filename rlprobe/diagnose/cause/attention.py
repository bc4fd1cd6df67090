"""What attention's numbers say where its queries, keys and values agree and its result does not.

Its probabilities tell most, where an eager kernel gives them out. But for a mask that masks
nothing, and a rounding, which leave marks of their own, statistics tell what differs and not why:
other angles, another scale, another mask and noise all move probabilities about.
"""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.diagnose.cause.found import Found, unknown
from rlprobe.diagnose.cause.shape import Shape, lacks, of
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import Finding
from rlprobe.judge.origin import Origin
from rlprobe.judge.tokens import Profile

#: Difference of first or last tokens, relative to the others', from which on they are touched.
_TOUCHED = 0.2


def cause(finding: Finding, origin: Origin, shape: Shape, profile: Profile | None) -> Found:
    """The cause where attention's inputs agree and its result does not."""
    said = [
        "queries, keys and values agree and what attention makes of them does not"
        if origin.kind == kinds.GLUE
        else "the attention's output differs"
    ]
    said += _along(finding, profile)
    chances = _chances(finding, origin)
    if chances is None:
        return unknown(*said, "its probabilities are not among the records")
    if not chances["beyond"]:
        return _mixed(shape, origin.row, said)
    if chances["min_benchmark"] == 0 < chances["min_target"]:
        return Found("mask", [*said, "no attention probability is 0 any more: nothing is masked"])
    if chances["min_target"] == 0 < chances["min_benchmark"]:
        return Found("mask", [
            *said, "some attention probabilities are 0 on the target and none on the benchmark: "
            "what was seen is masked",
        ])  # fmt: skip
    own = of(chances)
    if own.rounded_to is not None:
        return Found("rounding_order", [*said, f"attention probabilities: {own.said_rounding()}"])
    return unknown(*said, *_moved(chances, own))


def _moved(chances: dict[str, Any], own: Shape) -> list[str]:
    """How the probabilities differ, in words."""
    said = [f"attention probabilities differ by {own.error:.2g}"]
    before, after = chances.get("mean_benchmark"), chances.get("mean_target")
    if before and after:
        said[0] += f" and sum to {after / before:.7g} times the benchmark's"
    if own.factor is not None:
        said[0] += f"; their norm is {abs(own.factor):.5g} times the benchmark's"
    if chances["max_target"] < 1 == chances["max_benchmark"]:
        said.append("no probability is 1 any more")
    return said


def _along(finding: Finding, profile: Profile | None) -> list[str]:
    """Where along sequences the result parts, in words."""
    said = []
    onset = [d for d in finding.key_data if d.position is not None and d.error]
    if onset:
        first = min(onset, key=lambda d: d.position or 0)
        said.append(
            f"{first.name} part from token {first.position} of the response on, in the sample "
            "that differs most"
        )
    if profile is None:
        return said
    if profile.onset is not None:
        said.append(f"the block's output parts from position {profile.onset} on")
    for name, size in (("first", profile.first), ("last", profile.last)):
        touched = "differ" if size > _TOUCHED else "hardly differ"
        said.append(f"the {name} tokens of sequences {touched} ({size:.2g} of the others' error)")
    return said


def _mixed(shape: Shape, row: dict[str, Any], said: list[str]) -> Found:
    """Attention whose probabilities agree and whose result does not."""
    said = [*said, "attention probabilities agree: values are put together otherwise"]
    if lacks(shape, row):
        said.append(
            f"its result is as where a part of it is set to 0 ({shape.error**2:.1%} of its "
            "square) and the rest is as before"
        )
    return unknown(*said)


def _chances(finding: Finding, origin: Origin) -> dict[str, Any] | None:
    """Attention probabilities of the same call, where an eager kernel gave them out."""
    rows = finding.stage.rows.filter(
        (pl.col("module") == origin.module)
        & (pl.col("micro_batch") == origin.row["micro_batch"])
        & (pl.col("phase") == origin.row["phase"])
        & (pl.col("slot") == "output")
        & (pl.col("shape_benchmark").list.len() == 4)
        & pl.col("error").is_not_null()
    )
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    known = all(
        row[f"{n}_{s}"] is not None for n in ("min", "max") for s in ("benchmark", "target")
    )
    return (
        row if known and row["min_benchmark"] >= -1e-6 and row["max_benchmark"] <= 1.001 else None
    )
