"""Lower a fault's strength until the origin record's error is twice its floor.

Errors grow with the strength in ways that differ from fault to fault, and many saturate, so the
strength is searched for: the first guess takes the error as proportional; until one is too weak,
further ones follow the power law through the last two, and then that through the nearest two that
are too strong and too weak. What does not shrink, or jumps over the aim, is not scalable and says
why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: Multiples of the floor that are aimed at and accepted.
AIM, LOW, HIGH = 2.0, 1.5, 2.8
#: Runs spent on one fault.
MOST = 8
_UNMOVED = 0.02
_FLATTEST = 0.45


@dataclass(frozen=True)
class Weakened:
    """Where the search ended."""

    strength: float
    ratio: float | None
    #: Why no strength brought the error to the aim; empty where one did.
    reason: str = ""

    @property
    def reached(self) -> bool:
        return not self.reason


def search(full: float | None, ratio_at: Callable[[float], float | None]) -> Weakened:
    """Find the strength.

    Args:
        full: the record's ratio at strength 1.
        ratio_at: runs the fault at a strength; the same record's error over its floor.
    """
    if full is None or not math.isfinite(full):
        return Weakened(1.0, full, "its error is not a finite multiple of the floor")
    if LOW <= full <= HIGH:
        return Weakened(1.0, full)
    if full < LOW:
        return Weakened(1.0, full, "its error at full strength is below twice the floor already")
    tried = [(1.0, full)]
    weak: tuple[float, float] | None = None
    strong = tried[0]
    strength = AIM / full
    for _ in range(MOST):
        ratio = ratio_at(strength)
        if ratio is None or not math.isfinite(ratio):
            return Weakened(strength, ratio, "its error is not a finite multiple of the floor")
        if LOW <= ratio <= HIGH:
            return Weakened(strength, ratio)
        if len(tried) == 1 and abs(ratio / full - 1) < _UNMOVED:
            return Weakened(strength, ratio, "it ignores its strength")
        tried.append((strength, ratio))
        # the same end moved twice: no power law holds here (saturation, round-off)
        halve = weak is not None and (ratio > AIM) == (tried[-2][1] > AIM)
        if ratio > AIM:
            strong = tried[-1]
        else:
            weak = tried[-1]
        strength = _extrapolated(*tried[-2:]) if weak is None else _between(strong, weak, halve)
    lowest = 0.0 if weak is None else weak[0]
    reason = f"no strength between {lowest:.2e} and {strong[0]:.2e} reaches it"
    return Weakened(*tried[-1], reason)


def _extrapolated(one: tuple[float, float], other: tuple[float, float]) -> float:
    """A weaker strength along the power law through two that are too strong.

    Near saturation the error hardly follows the strength: no law flatter than ``_FLATTEST`` is
    followed, or the next strength would be none at all.
    """
    (s1, r1), (s2, r2) = one, other
    power = math.log(r2 / r1) / math.log(s2 / s1) if r1 != r2 else 0.0
    return float(s2 * (AIM / r2) ** (1 / max(power, _FLATTEST)))


def _between(strong: tuple[float, float], weak: tuple[float, float], halve: bool) -> float:
    """Where the power law through both reaches the aim, or their middle."""
    (s1, r1), (s2, r2) = strong, weak
    share = 0.5 if halve or r2 <= 0 else math.log(AIM / r2) / math.log(r1 / r2)
    return float(s2 * (s1 / s2) ** share)
