"""Rows of two sides that are of the same sample: the one place where key data are joined.

A sample may occur several times in a batch; its occurrences are paired in order. A row that nothing
names a sample for has no partner, on either side.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rlprobe.dumps.key_data import Row

#: A sample, and which occurrence of it.
Key = tuple[str, int]


class Pair(NamedTuple):
    """One occurrence of a sample on both sides; None where a side lacks it."""

    #: None where nothing names it: such a row is alone.
    sample: str | None
    occurrence: int
    benchmark: Row | None
    target: Row | None


def pairs(benchmark: Iterable[Row], target: Iterable[Row]) -> Iterator[Pair]:
    """All rows of both sides, samples in the order in which they first appear."""
    # the nameless of one side must not meet those of the other
    sides = [_by_sample(benchmark, "benchmark"), _by_sample(target, "target")]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        rows = (side.get(name, []) for side in sides)
        for occurrence, (one, other) in enumerate(itertools.zip_longest(*rows)):
            yield Pair(name[0], occurrence, one, other)


def joined(benchmark: Iterable[Row], target: Iterable[Row]) -> list[tuple[Key, Row, Row]]:
    """The rows that have a partner, in the order of :func:`pairs`."""
    return [
        ((pair.sample, pair.occurrence), pair.benchmark, pair.target)
        for pair in pairs(benchmark, target)
        if pair.sample is not None and pair.benchmark is not None and pair.target is not None
    ]


def keyed(rows: Iterable[Row]) -> dict[Key, Row]:
    """One side's rows that have a sample."""
    return {
        (pair.sample, pair.occurrence): pair.benchmark
        for pair in pairs(rows, ())
        if pair.sample is not None and pair.benchmark is not None
    }


def _by_sample(side: Iterable[Row], alone: str) -> dict[tuple[str | None, str], list[Row]]:
    """Rows by sample; a row without one is alone."""
    found: dict[tuple[str | None, str], list[Row]] = defaultdict(list)
    for number, row in enumerate(side):
        found[row.sample, "" if row.sample else f"{alone} {number}"].append(row)
    return dict(found)
