"""What a module, a loss or an update is given differs, and is a cause by what it is."""

from __future__ import annotations

import re

from rlprobe.diagnose.cause.differences import Fact, Record
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.said import say

_INTEGER = re.compile(r"torch\.(u?int|long|short|bool)")
#: A number that is added to hide something is at most this.
_HIDDEN = -1e3


class Mask:
    """An input called mask that is one: truth values, or numbers that hide what is added."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """What the record is."""
        row = difference.row
        index = str(row.get("index"))
        if row.get("slot") != "input" or "mask" not in index:
            return None
        whole = _INTEGER.match(str(row.get("dtype_benchmark")))
        lowest = [row.get(f"min_{side}") for side in ("benchmark", "target")]
        hides = any(isinstance(low, (int, float)) and low <= _HIDDEN for low in lowest)
        unsaid = all(low is None for low in lowest)
        if not (whole or hides or unsaid):
            return None
        return Fit("mask", (say("the input {index} differs", index=index),))


class Integers:
    """Whole numbers that come in: tokens, indices."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """What the record is; masks and positions are said as such."""
        row = difference.row
        index = str(row.get("index"))
        if row.get("slot") != "input" or not _INTEGER.match(str(row.get("dtype_benchmark"))):
            return None
        if "mask" in index or "position" in index:
            return None
        # positions cost nothing, and are whole numbers too
        return Fit("data", (say("the integer input {index} differs", index=index),), choices=1)


class Known:
    """Something whose very difference is the cause."""

    needs = Fact

    def fit(self, difference: Fact) -> Fit | None:
        """There is nothing to fit."""
        return Fit(difference.cause, difference.said)
