"""Causes in what attention makes of queries, keys and values that agree.

Three things tell: its probabilities, where an eager kernel gives them out; its result's size; and
where along the sequence the result parts. The first token of a sequence attends to itself alone,
so only a mask that lets it see others, or other values, change what it gets. The last one attends
to all tokens, so a mask that shows tokens what comes after them leaves it alone, and other values
do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from rlprobe.diagnose.cause.shape import Shape, lacks, of
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import Finding
from rlprobe.judge.origin import Origin
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.tokens import Profile

Found = tuple[str, float, list[str]]

#: Difference of first or last tokens, relative to the others', from which on they are touched.
_TOUCHED = 0.2
#: Probabilities that differ by less, without bias, are rounded otherwise: half of what one rounding
#: to bfloat16 makes.
_SMALL = 8e-4
#: Means of probabilities that sum to 1 agree to this, and to this share of what they differ by.
_ROUNDED_SUM, _UNNORMALISED = 2e-7, 0.02
#: Share of the probabilities' difference that is one of size, for a change of scale.
_COHERENT = 0.2
#: The same of a mixture of values: those of other heads are as large on the whole, those of other
#: tokens are averaged over more or fewer.
_OF_SIZE = 0.1


@dataclass(frozen=True)
class _Along:
    """Where along sequences the attention's result parts."""

    #: It sets in at a place of its own.
    late: bool
    #: First tokens differ, last tokens differ; None where nothing tells.
    first: bool | None
    last: bool | None

    @property
    def seen_too_early(self) -> bool:
        """First tokens differ and last ones, which see all tokens anyway, do not."""
        return self.first is True and self.last is False


def cause(finding: Finding, origin: Origin, shape: Shape, profile: Profile | None) -> Found:
    """The cause where attention's inputs agree and its result does not."""
    said = [
        "queries, keys and values agree and what attention makes of them does not"
        if origin.kind == kinds.GLUE
        else "the attention's output differs"
    ]
    onset = [d for d in finding.key_data if d.position is not None and d.error]
    if onset:
        first = min(onset, key=lambda d: d.position or 0)
        said.append(
            f"{first.name} part from token {first.position} of the response on, in the sample "
            "that differs most"
        )
    along = _along(finding, profile, said)
    chances = _chances(finding, origin)
    if chances is None:
        return _unseen(shape, along, said)
    if not chances["beyond"]:
        return _mixed(shape, origin.row, along, said)
    missing = _unnormalised(chances)
    # Roundings do not sum to 1 either, but leave a probability of 1 what it is: the first token's.
    lost = bool(along.first) or chances["max_target"] != chances["max_benchmark"]
    if missing is not None and lost:
        return "unknown", 0.5, [
            *said,
            f"attention probabilities sum to {missing:.6g} times the benchmark's, which no mask, "
            "scale or angle does: something else takes a share (a sink), or they are not "
            "normalised",
        ]  # fmt: skip
    if chances["min_benchmark"] == 0 < chances["min_target"]:
        return "mask", 0.9, [*said, "no attention probability is 0 any more: nothing is masked"]
    if chances["max_target"] < 1 == chances["max_benchmark"]:
        return "mask", 0.8, [
            *said, "no token attends to itself alone any more: the first one sees others"
        ]  # fmt: skip
    own = of(chances)
    if own.factor is None or own.error == 0:
        return "mask", 0.4, said
    if own.rounded_to is not None:
        return "rounding_order", 0.6, [*said, f"attention probabilities: {own.said_rounding()}"]
    if along.late:
        return "mask", 0.6, said
    if along.first:
        return "mask", 0.7, [*said, "the first token of a sequence differs: it sees others"]
    # A sharper or flatter softmax moves all probabilities one way; other angles move them about.
    bias = abs(own.factor - 1.0) / own.error
    if bias > _COHERENT:
        return (
            "hyperparameter",
            0.6,
            [
                *said,
                f"masked tokens stay masked and attention is "
                f"{'sharper' if own.factor > 1 else 'flatter'} throughout: another softmax scale",
            ],
        )
    if own.error < _SMALL:
        return "rounding_order", 0.4, [
            *said, f"probabilities differ by {own.error:.2g}, without bias: too little for angles"
        ]  # fmt: skip
    return "position", 0.5, [
        *said, "masked tokens stay masked and attention is as sharp as before: other angles"
    ]  # fmt: skip


def _unnormalised(chances: dict[str, Any]) -> float | None:
    """Sum of probabilities over the benchmark's, where they do not sum to 1 any more."""
    before, after = (chances.get(f"mean_{side}") for side in ("benchmark", "target"))
    if not isinstance(before, float) or not isinstance(after, float) or before <= 0:
        return None
    ratio = after / before
    allowed = max(_ROUNDED_SUM, _UNNORMALISED * float(chances["error"]))
    allowed = max(allowed, UNIT.get(str(chances["dtype_benchmark"]), 0.0))
    return ratio if abs(ratio - 1.0) > allowed else None


def _along(finding: Finding, profile: Profile | None, said: list[str]) -> _Along:
    """Of the block's own tokens where they were sketched, else of the stage's results."""
    if profile is not None:
        if profile.onset is not None:
            said.append(f"the block's output parts from position {profile.onset} on")
        return _Along(profile.onset is not None, profile.first > _TOUCHED, profile.last > _TOUCHED)
    late = [d for d in finding.key_data if d.onset is not None]
    if late:
        said.append(f"{late[0].name} part from position {late[0].onset} of the sequence on")
    # Read off the result that differs most clearly, as others may show round-off alone.
    clear = max(finding.outcomes, key=lambda outcome: outcome.excess, default=None)
    lone = [
        d.first
        for d in finding.key_data
        if clear is not None and d.name == clear.name and d.first is not None and d.error
    ]
    touched = any(first > _TOUCHED for first in lone) if lone else None
    return _Along(bool(late), touched, None)


_EARLY = (
    "the first token of a sequence differs and the last one, which sees all tokens anyway, does "
    "not: tokens see what comes after them"
)


def _mixed(shape: Shape, row: dict[str, Any], along: _Along, said: list[str]) -> Found:
    """Attention whose probabilities agree and whose result does not."""
    if along.late:
        return "mask", 0.6, said
    if lacks(shape, row):
        return (
            "unknown",
            0.5,
            [
                *said,
                f"the target's is the benchmark's without a part of it ({shape.error**2:.1%} of "
                "its square), and the rest is as before: a head or channels that are not written",
            ],
        )
    if along.seen_too_early:
        return "mask", 0.75, [*said, _EARLY]
    if along.last is None and _bias(shape) > _OF_SIZE:
        return "mask", 0.5, [
            *said, f"its result is {shape.factor:.4g} times as large: other tokens are averaged"
        ]  # fmt: skip
    if along.first is False:
        return "mask", 0.4, [
            *said, "probabilities and first tokens agree: other tokens are averaged"
        ]  # fmt: skip
    return "layout", 0.5, [*said, "probabilities agree: other heads' values are mixed"]


def _bias(shape: Shape) -> float:
    """Share of the difference that is one of size."""
    return 0.0 if shape.factor is None else abs(shape.factor - 1.0) / shape.error


def _unseen(shape: Shape, along: _Along, said: list[str]) -> Found:
    """Attention of a fused kernel, which gives out no probabilities."""
    if along.late:
        return "mask", 0.6, said
    if along.seen_too_early:
        return "mask", 0.75, [*said, _EARLY]
    if along.first:
        said = [*said, "the first token of a sequence differs, which attends to itself alone"]
        if along.last is None and _bias(shape) > _COHERENT:
            return "mask", 0.6, [*said, "its result has another size: it sees others"]
        return "layout", 0.5, [*said, "and so do all others: other heads' values"]
    if along.first is None:
        return "unknown", 0.3, [*said, "neither probabilities nor tokens' results tell why"]
    if _bias(shape) > _COHERENT:
        return "hyperparameter", 0.4, [
            *said, "first tokens agree and the result has another size: another softmax scale"
        ]  # fmt: skip
    return "position", 0.35, [
        *said, "first tokens agree and the result is as large as before: other angles, or rounding"
    ]  # fmt: skip


def _chances(finding: Finding, origin: Origin) -> dict[str, Any] | None:
    """Attention probabilities of the same call, where an eager kernel gave them out."""
    rows = finding.stage.rows.filter(
        (pl.col("module") == origin.module)
        & (pl.col("passage") == origin.row["passage"])
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
