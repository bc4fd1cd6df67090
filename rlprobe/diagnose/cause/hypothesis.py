"""Hypotheses of why two sides differ: what one is, and which of several is believed.

A hypothesis needs a kind of difference (:mod:`differences`) and fits its law to it. What the law
leaves, held against what noise explains, decides; then the number of parameters that were chosen
to fit. Two laws of as many parameters that name different classes are a tie, and a tie is unknown:
a wrong class sends somebody to look in the wrong place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rlprobe.said import Said, joined, say

UNKNOWN = "unknown"


class Found(NamedTuple):
    """A cause class with its evidence."""

    cause: str
    #: Sentences that are true of the numbers, whatever the cause; the last says the law.
    said: list[Said]


def unknown(*said: Said) -> Found:
    """No law holds; what was seen is said all the same."""
    return Found(UNKNOWN, list(said))


@dataclass(frozen=True)
class Fit:
    """A law, fitted."""

    #: Class of :mod:`rlprobe.causes`.
    cause: str
    #: What is true of the numbers if the law holds; the last sentence says the law.
    said: tuple[Said, ...]
    #: What the law leaves of the difference over what noise explains: up to 1 it holds.
    residual: float = 0.0
    #: What was fitted, by name, and standard errors where they are known.
    parameters: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    #: Choices among a few, such as a format, that were made to fit.
    choices: int = 0
    #: Share of the difference's square that the law leaves, where it was fitted to elements.
    left: float = 0.0

    @property
    def cost(self) -> int:
        """How many numbers were chosen to fit."""
        return len(self.parameters) + self.choices

    @property
    def holds(self) -> bool:
        """Whether noise explains what is left."""
        return self.residual <= 1.0


class Hypothesis(Protocol):
    """A law that a difference may obey."""

    @property
    def needs(self) -> type:
        """The kind of difference that it can be fitted to."""

    def fit(self, difference: Any) -> Fit | None:
        """Fit it to both sides and their floor; None where there is nothing to fit it to."""


def fits(hypotheses: Iterable[Hypothesis], differences: Sequence[object]) -> list[Fit]:
    """Every hypothesis fitted to every difference of its kind."""
    return [
        fit
        for hypothesis in hypotheses
        for difference in differences
        if isinstance(difference, hypothesis.needs)
        and (fit := hypothesis.fit(difference)) is not None
    ]


def weigh(found: Sequence[Fit], seen: Sequence[Said]) -> Found:
    """The class that the simplest law names among those that hold.

    Args:
        found: fitted laws.
        seen: what was seen whatever the cause.
    """
    holding = [fit for fit in found if fit.holds]
    least = min((fit.cost for fit in holding), default=0)
    best = [fit for fit in holding if fit.cost == least]
    classes = {fit.cause for fit in best}
    nameless = [sentence for fit in holding if fit.cause == UNKNOWN for sentence in fit.said]
    if not best or classes == {UNKNOWN}:
        return unknown(*seen, *nameless)
    if len(classes) > 1:
        laws = joined(
            (say("{said} ({cause})", said=fit.said[-1], cause=fit.cause) for fit in best),
            say("; or "),
        )
        return unknown(*seen, say("more than one law holds: {laws}", laws=laws))
    return Found(best[0].cause, [*seen, *best[0].said])


#: Laws that chance obeys less often than this are believed.
_CHANCE = 1e-6


def by_chance(count: int, left: float, candidates: int = 1) -> bool:
    """Whether one of some directions may explain so much of a difference that follows no law.

    The share of a random vector's square that a direction takes has its tail at
    (1 - share)^((n - 1) / 2).

    Args:
        count: n, numbers that differ.
        left: share of the difference's square that the best direction leaves.
        candidates: directions that were tried.
    """
    if left <= 0:
        return count < 2
    exponent = max(count - 1, 0) / 2.0
    return math.log(max(candidates, 1)) + exponent * math.log(min(left, 1.0)) > math.log(_CHANCE)
