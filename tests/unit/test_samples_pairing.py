"""Do rows of the same sample meet, and only those?"""

from __future__ import annotations

import numpy as np
import pytest

from rlprobe.compare.samples.pairing import joined, keyed, pairs
from rlprobe.dumps.key_data import Row


def rows(samples: str) -> list[Row]:
    """A row for each letter; a dot is a row that nothing names."""
    return [Row(None if s == "." else s, np.array([n]), 0, n) for n, s in enumerate(samples)]


def numbered(row: Row | None) -> int | None:
    return None if row is None else row.micro_step


@pytest.mark.parametrize(
    ("benchmark", "target", "found"),
    [
        ("ab", "ba", [("a", 0, 1), ("b", 1, 0)]),
        ("a", "b", [("a", 0, None), ("b", None, 0)]),
        ("aba", "aab", [("a", 0, 0), ("a", 2, 1), ("b", 1, 2)]),
        ("b", "aba", [("b", 0, 1), ("a", None, 0), ("a", None, 2)]),
        ("..", ".", [(None, 0, None), (None, 1, None), (None, None, 0)]),
        ("", "", []),
    ],
)
def test_rows_meet_by_sample_and_occurrence(
    benchmark: str, target: str, found: list[tuple[str | None, int | None, int | None]]
) -> None:
    every = list(pairs(rows(benchmark), rows(target)))
    assert [(p.sample, numbered(p.benchmark), numbered(p.target)) for p in every] == found
    both = [(s, b, t) for s, b, t in found if None not in (s, b, t)]
    assert [
        (key[0], one.micro_step, other.micro_step)
        for key, one, other in joined(rows(benchmark), rows(target))
    ] == both


def test_occurrences_are_counted_by_sample() -> None:
    found = keyed(rows("ab.a"))
    assert {key: row.micro_step for key, row in found.items()} == {
        ("a", 0): 0, ("a", 1): 3, ("b", 0): 1,
    }  # fmt: skip
