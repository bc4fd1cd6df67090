"""What one side puts before every module path, and the other does not: ``actor.model.layers.0``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

Prefixes = tuple[str, str]


def common(left: Iterable[str], right: Iterable[str]) -> Prefixes | None:
    """The prefixes, dots included, without which most paths of the sides are the same.

    A path speaks for the longest ending it has in common with a single path of the other side;
    ``layers.0`` of two towers says nothing. None where more than half of what speaks, or of the
    smaller side, does not agree.
    """
    sides = [list(dict.fromkeys(side)) for side in (left, right)]
    endings: dict[str, list[str]] = {}
    for path in sides[1]:
        for ending in _endings(path):
            endings.setdefault(ending, []).append(path)
    votes: Counter[Prefixes] = Counter()
    for path in sides[0]:
        shared = next((e for e in _endings(path) if e in endings), None)
        if shared is None or len(endings[shared]) > 1:
            continue
        (other,) = endings[shared]
        votes[path[: len(path) - len(shared)], other[: len(other) - len(shared)]] += 1
    if not votes:
        return None
    (found, count), *_ = votes.most_common(1)
    if found == ("", "") or 2 * count <= max(votes.total(), min(map(len, sides))):
        return None
    return found


def without(path: str, prefix: str) -> str | None:
    """The path without the prefix; "" for the module it names; None where it has another."""
    if path + "." == prefix:
        return ""
    return path[len(prefix) :] if path.startswith(prefix) else None


def _endings(path: str) -> Iterator[str]:
    """A path, and what is left of it component by component."""
    while path:
        yield path
        _, _, path = path.partition(".")
