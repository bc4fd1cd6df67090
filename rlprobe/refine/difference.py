"""One thing that differs between two traces, and how numbers are written in it."""

from __future__ import annotations

from dataclasses import dataclass

from rlprobe import sketch
from rlprobe.said import Said, exactly, say

#: The class of operators that differ and mean nothing by themselves.
IMPLEMENTATION = "implementation"
#: Kind of a parameter or buffer, which has no noise of its own.
CONSTANT = "constant"
#: Kinds of what an operator is given: the same numbers laid out otherwise, or another one's.
VIEWS, WIRING = "views", "wiring"
#: Kind of a value that is there once a collective has run, and that no operator made.
COLLECTIVE = "collective"


@dataclass(frozen=True)
class Difference:
    """One thing that differs between the traces."""

    #: Class of :mod:`rlprobe.causes`.
    cause: str
    said: Said
    #: Whether numbers differ from here on.
    effective: bool
    #: ``scalar``, ``value``, ``constant`` (a parameter or buffer), ``collective``, ``format``,
    #: ``operators``, ``moves`` (which only lay out), ``views``, ``wiring`` or ``kernel``.
    kind: str
    #: The operator that makes something else, of which one call stands for all.
    of: str = ""
    #: The step of both traces in which it is.
    at: int | None = None
    #: Whether later operators undo what it does.
    undone: bool = False


def sized(size: float, count: int) -> Said:
    """A relative difference in words: a sketch of more numbers than it has tells it about."""
    if count > sketch.K and size:
        return say("about {size:.2g}", size=size)
    return exactly(f"{size:.2g}")


def number(value: object) -> str:
    """A scalar argument as text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def apart(one: object, other: object, allowed: float) -> bool:
    """Whether two scalar arguments differ by more than an allowance relative to the first.

    A number that code took off a tensor (``.item()``) differs as much as the tensor did; whole
    numbers and words are equal or not.
    """
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return any(apart(a, b, allowed) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, (int, float)):
        return not (one == other or abs(other - one) <= allowed * abs(one))
    return one != other
