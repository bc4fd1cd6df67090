"""Other positions: a table of cosines and sines that stays one, of other angles.

Squares of a cosine and its sine sum to 1, whatever the angle. So over the whole table the sum of
squares is as before, exactly, and no value leaves its range. Noise, a factor, another format or a
part that is left out keep neither.
"""

from __future__ import annotations

import math
import re

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.differences import Record
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.row import Row, number
from rlprobe.said import say

#: Where a look is worth while.
_ROTARY = re.compile(r"rotary|rope|position", re.IGNORECASE)
_INTEGER = re.compile(r"torch\.(u?int|long|short)")
#: Round-off of a sum of squares in fp32, relative.
_LAST_BITS = 4e-6


class OfRecord:
    """The table of angles differs and is one on both sides."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Sum the squares of the call's records on both sides."""
        row = difference.row
        index, operator = str(row.get("index")), str(row.get("op"))
        named = "position" in index if row.get("slot") == "input" else _ROTARY.search(operator)
        if not named or row.get("slot") not in ("input", "output"):
            return None
        table = [each for each in difference.siblings if _is_number(each) and _same(each, row)]
        sums = [sum((number(each, f"norm_{side}") or 0.0) ** 2 for each in table)
                for side in ("benchmark", "target")]  # fmt: skip
        count = sum(math.prod(each.get("shape_benchmark") or [0]) for each in table)
        if not table or not count or not sums[0] or not math.isfinite(sum(sums)):
            return None
        allowed = _LAST_BITS + 4.0 * UNIT.get(str(row.get("dtype_benchmark")), 0.0) / count**0.5
        error = max(measure.of(each).error for each in table)
        # what no law binds changes the sum by its own square at the least
        if error**2 < 4.0 * allowed:
            return None
        off = abs(sums[1] / sums[0] - 1.0) / allowed
        said = (
            say(
                "{operator} makes a table of other angles: the squares of its cosines and "
                "sines sum to the same",
                operator=operator,
            )
            if row.get("slot") == "output"
            else say(
                "the input {index} differs: a table of other angles whose squares sum alike",
                index=index,
            )
        )
        return Fit("position", (said,), max(off, *(_leaves(each) for each in table)))


def _is_number(row: Row) -> bool:
    norms = [number(row, f"norm_{side}") for side in ("benchmark", "target")]
    return all(isinstance(norm, float) for norm in norms) and not _INTEGER.match(
        str(row.get("dtype_benchmark"))
    )


def _same(one: Row, other: Row) -> bool:
    """Whether two records are of one table: of one shape, and of one argument."""
    root = [str(row.get("index")).split(".")[0] for row in (one, other)]
    whole = one.get("slot") == "output" or root[0] == root[1]
    return whole and one.get("shape_benchmark") == other.get("shape_benchmark")


def _leaves(row: Row) -> float:
    """Whether the target leaves the benchmark's range of a cosine: infinity where it does."""
    ends = [
        number(row, f"{name}_{side}") for side in ("benchmark", "target") for name in ("max", "min")
    ]
    if any(not isinstance(end, float) for end in ends):
        return 0.0
    largest = max(1.0, *(abs(float(end or 0.0)) for end in ends[:2]))
    return math.inf if max(abs(float(end or 0.0)) for end in ends[2:]) > largest * 1.001 else 0.0


class OfIntegers:
    """Positions that come in as whole numbers, under that name or to what turns them to angles."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """What the record is."""
        row = difference.row
        index, operator = str(row.get("index")), str(row.get("op"))
        if row.get("slot") != "input" or not _INTEGER.match(str(row.get("dtype_benchmark"))):
            return None
        if "position" not in index and not _ROTARY.search(operator):
            return None
        return Fit(
            "position",
            (
                say(
                    "the input {index} of {operator}, positions, differs",
                    index=index,
                    operator=operator,
                ),
            ),
        )
