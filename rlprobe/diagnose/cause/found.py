"""What the numbers of one place are consistent with: a class, or none, and what is true of them."""

from __future__ import annotations

from typing import NamedTuple


class Found(NamedTuple):
    """A cause class with its evidence.

    A class is named only where the numbers obey a law that the class stands for, over all that was
    measured. What merely looks like it is evidence, and the class is unknown.
    """

    cause: str
    #: Sentences that are true of the numbers, whatever the cause; the last says the law.
    said: list[str]


def unknown(*said: str) -> Found:
    """No law holds; what was seen is said all the same."""
    return Found("unknown", list(said))
