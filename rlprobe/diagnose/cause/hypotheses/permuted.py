"""The same numbers in other places: channels, tokens or samples.

Moved elements leave maximum, minimum, mean and norm alone while the error is of order one. With
elements or rows at hand, where each came from is looked up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.differences import Array, Record, Tensors, Tokens
from rlprobe.diagnose.cause.hypothesis import Fit, by_chance
from rlprobe.judge import fits
from rlprobe.judge.row import Row, number
from rlprobe.said import NOTHING_SAID, Said, say

#: Least error of numbers that stand elsewhere.
_LEAST = 0.3
#: Difference of the extremes and the norm, relative, of numbers that moved about,
_SAME = 1e-5
#: and of the means, over the root of the mean square.
_SUM = 1e-5


_ROWS, _CHANNELS = say("rows"), say("channels")


class OfRecord:
    """Statistics agree and elements do not, in every micro-batch."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Compare the statistics."""
        apart = [_apart(row) for row in difference.every]
        if any(found is None for found in apart):
            return None
        of_what = NOTHING_SAID
        if difference.what != "output":
            of_what = say(" of the {what}", what=difference.what)
        said = say(
            "max, min, mean and norm{of_what} are equal and its elements differ by "
            "{error:.2g}: as where the same numbers stand in other places",
            of_what=of_what,
            error=measure.of(difference.row).error,
        )
        return Fit("layout", (said,), max(found for found in apart if found is not None), choices=1)


def _apart(row: Row) -> float | None:
    """How far a row's statistics are apart, over what round-off allows; None: error too small."""
    found = measure.of(row)
    norm = row.get("norm_benchmark")
    largest = max(abs(row.get("max_benchmark") or 0.0), abs(row.get("min_benchmark") or 0.0))
    if not norm or not largest or found.offset is None or not found.exact or found.error <= _LEAST:
        return None
    extremes = [abs(number(row, f"{name}_diff") or 0.0) / largest for name in ("max", "min")]
    size = abs(row.get("norm_diff") or 0.0) / norm
    return float(max(*(e / _SAME for e in extremes), size / _SAME, abs(found.offset) / _SUM))


class OfSamples:
    """Rows of a result that all lead to another sample's."""

    needs = Tokens
    #: Share of the rows that must.
    _ALL = 0.97
    #: Values of a row below which it leads anywhere.
    _SHORT = 4

    def fit(self, difference: Tokens) -> Fit | None:
        """Every row that differs, against every other sample's."""
        rows = [(name, b, t) for name, b, t in difference.pairs if len(b) >= self._SHORT]
        share = fits.of_other_rows(rows)
        if not share:
            return None
        lengths = sum(len(b) for _, b, t in rows if not np.array_equal(b, t))
        # each row chose one of the others: as many directions, over all values together
        left = (1.0 - fits.EXPLAINED) ** max(share, 1e-9)
        if by_chance(lengths, left, len(rows) ** 2):
            return None
        said = say(
            "{share:.0%} of the rows of {name} that differ lead to another sample's of "
            "the benchmark: results are handed back in another order",
            share=share,
            name=difference.name,
        )
        return Fit("row_order", (said,), (1.0 - share) / (1.0 - self._ALL), choices=1)


class OfTensors:
    """Rows or columns in another order."""

    needs = Tensors
    #: Equal within round-off of another kernel, relative to the largest value.
    _EQUAL = 1e-5
    #: Less does not come of moved elements.
    _LEAST = 0.05

    def fit(self, difference: Tensors) -> Fit | None:
        """Look up where each row or column came from."""
        b, t = difference.benchmark, difference.target
        tolerance = self._EQUAL * difference.scale
        size = float(np.linalg.norm(b))
        if not size or float(np.linalg.norm(difference.difference)) < self._LEAST * size:
            return None
        if not np.allclose(np.sort(b, axis=None), np.sort(t, axis=None), rtol=0, atol=tolerance):
            return None
        for name, one, other in ((_CHANNELS, b.T, t.T), (_ROWS, b, t)):
            order = _order(one, other, tolerance)
            if order is not None:
                moved = int(np.count_nonzero(order != np.arange(len(order))))
                cause = "layout" if name == _CHANNELS else "row_order"
                said = say(
                    "{moved} of {count} {name} stand in other places: {how}",
                    moved=moved,
                    count=len(order),
                    name=name,
                    how=_described(order),
                )
                return Fit(cause, (said,), choices=1)
        said = say("the target holds the benchmark's numbers in other places")
        return Fit("layout", (said,), choices=1)


#: More columns than this are not matched with one another.
_COLUMNS = 8192


def _order(one: Array, other: Array, tolerance: float) -> npt.NDArray[np.int64] | None:
    """Where each row of ``other`` comes from in ``one``; None where one comes from nowhere."""
    if not 1 < len(one) <= _COLUMNS:
        return None
    # One random projection tells rows apart; whether they are the same is checked in full.
    direction = np.random.default_rng(0).standard_normal(one.shape[1])
    keys = [np.argsort(x @ direction, kind="stable") for x in (one, other)]
    if not np.allclose(one[keys[0]], other[keys[1]], rtol=0, atol=tolerance):
        return None
    order = np.empty(len(one), dtype=np.int64)
    order[keys[1]] = keys[0]
    return order


def _described(order: npt.NDArray[np.int64]) -> Said:
    steps = np.unique((order - np.arange(len(order))) % len(order))
    if len(steps) == 1:
        return say("moved round by {steps}", steps=int(steps[0]))
    runs = np.flatnonzero(np.diff(order) != 1)
    block = int(np.gcd.reduce(np.append(runs + 1, len(order))))
    if block > 1:
        blocks = order[::block] // block
        shown = ", ".join(str(int(i)) for i in blocks[:8])
        return say(
            "blocks of {block} in the order {shown}",
            block=block,
            shown=shown + (", …" if len(blocks) > 8 else ""),
        )
    shown = ", ".join(str(int(i)) for i in order[:8])
    return say("the first come from {shown}", shown=shown)
