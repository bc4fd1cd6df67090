"""Lower a fault's strength until the origin record's error is twice its floor.

Errors grow with the strength in ways that differ from fault to fault, so the strength is searched
for: the first guess takes the error as proportional, later ones follow the power law through the
last two. What does not shrink, or jumps over the aim, is not scalable and says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: Multiples of the floor that are aimed at and accepted.
AIM, LOW, HIGH = 2.0, 1.5, 2.8
#: Runs spent on one fault.
MOST = 7
_UNMOVED = 0.02


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
    known: list[tuple[float, float]] = [(1.0, full)]
    above, below = 1.0, 0.0
    strength = AIM / full
    for _ in range(MOST):
        ratio = ratio_at(strength)
        if ratio is None or not math.isfinite(ratio):
            return Weakened(strength, ratio, "its error is not a finite multiple of the floor")
        if LOW <= ratio <= HIGH:
            return Weakened(strength, ratio)
        if len(known) == 1 and abs(ratio / full - 1) < _UNMOVED:
            return Weakened(strength, ratio, "it ignores its strength")
        known.append((strength, ratio))
        above, below = (strength, below) if ratio > AIM else (above, strength)
        strength = _next(known, above, below)
    return Weakened(
        known[-1][0], known[-1][1], f"no strength between {below:.2e} and {above:.2e} reaches it"
    )


def _next(known: list[tuple[float, float]], above: float, below: float) -> float:
    """A strength strictly between the nearest ones that are too strong and too weak."""
    (s1, r1), (s2, r2) = known[-2:]
    middle = math.sqrt(above * below) if below > 0 else above / 8
    if r1 <= 0 or r2 <= 0 or r1 == r2 or s1 == s2:
        return middle
    power = math.log(r2 / r1) / math.log(s2 / s1)
    if power <= 0.05:
        return middle
    guess = s2 * (AIM / r2) ** (1 / power)
    return guess if below < guess < above else middle
