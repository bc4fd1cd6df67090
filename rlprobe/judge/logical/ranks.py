"""The one rank that has a record otherwise, of those that share it or hold it alike."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from rlprobe.coordinates import groups
from rlprobe.judge.logical.whole import Part, Whole
from rlprobe.said import Said, say


@dataclass(frozen=True)
class Place:
    """The one rank of the target that has a record otherwise."""

    rank: int
    #: Which part of it, in words.
    said: Said


#: A difference that is this many times larger in the stretches of one rank is that rank's.
_ONE_RANK = 10.0


def farthest(benchmark: Whole, target: Whole) -> tuple[Whole, Place | None]:
    """The target with that replica in it that differs most, and which rank's it is.

    None for the rank where replicas are equal up to round-off of their sketches.
    """
    found: tuple[float, Whole, Part] | None = None
    for part in target.replicas:
        counted = next(
            own for own in target.parts if (own.group, own.first) == (part.group, part.first)
        )
        other = dataclasses.replace(target, sketch=target.sketch - counted.sketch + part.sketch)
        distance = float(np.linalg.norm(other.sketch - benchmark.sketch))
        if found is None or distance > found[0]:
            found = distance, other, part
    own = float(np.linalg.norm(target.sketch - benchmark.sketch))
    if found is None or found[0] <= own * _ONE_RANK:
        return target, None
    return found[1], Place(
        found[2].rank,
        say("of the ranks that hold the same, rank {rank} differs", rank=found[2].rank),
    )


def one_rank(benchmark: Whole, target: Whole) -> Place | None:
    """The rank whose features alone differ, where ranks have different ones."""
    stretches = groups(target.width)
    if stretches == 1:
        return None
    apart = np.sum((target.sketch - benchmark.sketch) ** 2, axis=1)
    held: dict[tuple[int, int], list[int]] = {}
    for part in target.parts:
        held.setdefault((part.first, part.features), []).append(part.rank)
    each = target.width // stretches
    if len(held) < 2 or any(first % each or count % each for first, count in held):
        return None
    errors = {
        (first, count): float(apart[first // each : (first + count) // each].sum())
        for first, count in held
    }
    worst = max(errors, key=lambda at: errors[at])
    rest = max(error for at, error in errors.items() if at != worst)
    if len(held[worst]) > 1 or errors[worst] <= rest * _ONE_RANK**2:
        return None
    first, count = worst
    rank = held[worst][0]
    return Place(
        rank,
        say(
            "only features {first} to {last} of {width} differ, which rank {rank} has",
            first=first,
            last=first + count - 1,
            width=target.width,
            rank=rank,
        ),
    )
