"""Two sequences of calls laid beside each other, as biologists align sequences: pairs never cross.

A pair needs the same function; dtypes and shapes that agree, and values that are close, count for
it. The alignment of the largest sum is taken (Needleman and Wunsch 1970, gaps for free), so that
what one side calls more often stays alone and shifts nothing behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Calls to either side of the diagonal that are looked at, besides the difference in length: enough
#: for any real shift, and keeps a hundred thousand calls within seconds.
_BAND = 256
#: Weight of a pair of the same function, whatever its arguments.
_SAME = 0.25
#: Relative difference at which two values count half: above bfloat16's rounding, far below what
#: tells two calls apart.
_HALF = 0.02
#: Two pairings whose scores are this near are both possible.
_AS_GOOD = 0.02


@dataclass(frozen=True)
class Calls:
    """Calls in the order they happened."""

    #: Codes of what was called; the same on both sides.
    keys: Ints
    #: Hash of each call's dtypes and shapes.
    signatures: npt.NDArray[np.uint64]
    #: Numbers that describe its values [calls, numbers]; NaN where there is none.
    values: Floats

    def __len__(self) -> int:
        return len(self.keys)

    def taken(self, rows: Ints) -> Calls:
        return Calls(self.keys[rows], self.signatures[rows], self.values[rows])


@dataclass(frozen=True)
class Aligned:
    """Rows of both sides that are pairs, and whether each could as well have been another."""

    left: Ints
    right: Ints
    ambiguous: npt.NDArray[np.bool_]


def align(left: Calls, right: Calls) -> Aligned:
    """The best alignment of two sequences."""
    if not len(left) or not len(right):
        none = np.zeros(0, np.int64)
        return Aligned(none, none, np.zeros(0, bool))
    rows, columns = _traced(*_filled(left, right))
    return Aligned(rows, columns, _ambiguous(left, right, rows, columns))


def alike(left: Calls, right: Calls, pairs: Aligned) -> npt.NDArray[np.bool_]:
    """Which pairs agree in dtypes and shapes, and are near in their values."""
    same = left.signatures[pairs.left] == right.signatures[pairs.right]
    near = closeness(left.values[pairs.left], right.values[pairs.right]) > 0.5
    result: npt.NDArray[np.bool_] = same & near
    return result


def scores(left: Calls, row: int, right: Calls, candidates: Ints) -> Floats:
    """How well one call of the left goes with some of the right of the same key."""
    close = closeness(left.values[row], right.values[candidates])
    same = right.signatures[candidates] == left.signatures[row]
    return np.where(same, 1.0 + close, 0.0) + _SAME


def closeness(value: Floats, others: Floats) -> Floats:
    """From 0 (nothing in common) to 1 (equal); 0.5 where nothing is known."""
    with np.errstate(all="ignore"):
        scale = np.maximum(np.abs(value), np.abs(others))
        relative = np.where(value == others, 0.0, np.abs(value - others) / scale)
        each = 1.0 / (1.0 + relative / _HALF)
    # one side without a number, or an infinity against a number, says that they differ
    both = ~np.isnan(value) & ~np.isnan(others)
    neither = np.isnan(value) & np.isnan(others)
    each = np.where(both, np.nan_to_num(each, nan=0.0), 0.0)
    known = (~neither).sum(axis=1)
    result: Floats = np.where(known > 0, each.sum(axis=1) / np.maximum(known, 1), 0.5)
    return result


def _filled(left: Calls, right: Calls) -> tuple[Any, Any, Ints, int]:
    """The table's decisions: whether a pair ends here, whether the best is that of the left.

    Row i holds the columns from ``starts[i]``, ``width`` of them; column j stands for the first j
    calls of the right.
    """
    n, m = len(left), len(right)
    half = _BAND + abs(n - m)
    width = min(m, 2 * half) + 1
    starts = np.clip(np.arange(1, n + 1) * m // n - half, 0, m + 1 - width)
    paired = np.zeros((n, width), bool)
    skips = np.zeros((n, width), bool)
    places = {key: np.flatnonzero(right.keys == key) for key in np.unique(left.keys).tolist()}
    best, at = np.zeros(width), 0
    for row in range(n):
        start = int(starts[row])
        above = _shifted(best, start - at, width)
        diagonal = _shifted(best, start - 1 - at, width)
        of_key = places[int(left.keys[row])]
        low, high = np.searchsorted(of_key, [max(start - 1, 0), start + width - 1])
        columns = of_key[low:high]
        own = above.copy()
        if len(columns):
            into = columns + 1 - start
            gained = diagonal[into] + scores(left, row, right, columns)
            better = gained > own[into]
            own[into[better]] = gained[better]
            paired[row, into[better]] = True
        best, at = np.maximum.accumulate(own), start
        skips[row] = best > own
    return paired, skips, starts, m


def _shifted(best: Floats, by: int, width: int) -> Floats:
    """The row's entries from ``by`` on; what lies outside is its edge."""
    return best[np.clip(np.arange(by, by + width), 0, len(best) - 1)]


def _traced(paired: Any, skips: Any, starts: Ints, m: int) -> tuple[Ints, Ints]:
    rows, columns = [], []
    column = m
    for row in range(len(starts) - 1, -1, -1):
        start = int(starts[row])
        at = min(max(column - start, 0), paired.shape[1] - 1)
        while at > 0 and skips[row, at]:
            at -= 1
        column = start + at
        if paired[row, at] and column > 0:
            column -= 1
            rows.append(row)
            columns.append(column)
    return np.array(rows[::-1], np.int64), np.array(columns[::-1], np.int64)


def _ambiguous(left: Calls, right: Calls, rows: Ints, columns: Ints) -> npt.NDArray[np.bool_]:
    """Pairs of which one side could as well be its neighbour that stayed alone."""
    found = np.zeros(len(rows), bool)
    for alone, own, other, mine, theirs in (
        (columns, right, left, columns, rows),
        (rows, left, right, rows, columns),
    ):
        free = np.ones(len(own), bool)
        free[alone] = False
        for call in np.flatnonzero(free).tolist():
            for step in (-1, 1):
                place = int(np.searchsorted(mine, call)) - (step < 0)
                room = call
                # a pair that can move leaves its place to the next
                while 0 <= place < len(mine) and _movable(own, other, mine, theirs, place, room):
                    found[place] = True
                    room = int(mine[place])
                    place += step
    return found


def _movable(own: Calls, other: Calls, mine: Ints, theirs: Ints, place: int, room: int) -> bool:
    now, partner = int(mine[place]), int(theirs[place])
    if own.keys[room] != other.keys[partner]:
        return False
    here, there = scores(other, partner, own, np.array([now, room]))
    return bool(there >= here - _AS_GOOD)
