"""Tokens see others: probabilities that were 0 are not any more, or the other way round.

A mask leaves probabilities normalised: they sum to what they summed to. Dropout, noise and a part
that is not computed do not. And what vanishes is as small as a number of the format may be.
"""

from __future__ import annotations

import math

from rlprobe.diagnose.cause.differences import Probabilities
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.row import Row, number
from rlprobe.said import say

#: Smallest number of fp16, in which a kernel may compute whatever a record's format.
_VANISHES = 1e-7
#: Difference of the sums that round-off makes, relative.
_SUM = 1e-5


class OfProbabilities:
    """Nothing is hidden any more, or something is that was not."""

    needs = Probabilities

    def fit(self, difference: Probabilities) -> Fit | None:
        """Compare the smallest probabilities, and the sums."""
        row = difference.row
        low = {side: number(row, f"min_{side}") or 0.0 for side in ("benchmark", "target")}
        off = _sums(row)
        if low["benchmark"] == 0 < low["target"]:
            said = say("no attention probability is 0 any more: nothing is masked")
            return Fit("mask", (said,), off)
        if low["target"] == 0 and low["benchmark"] > _VANISHES:
            said = say(
                "some attention probabilities are 0 on the target and none on the "
                "benchmark: what was seen is masked"
            )
            return Fit("mask", (said,), off)
        return None


def _sums(row: Row) -> float:
    """How far the sums are apart, over what round-off allows."""
    before, after = row.get("mean_benchmark"), row.get("mean_target")
    if not before or after is None or not math.isfinite(after):
        return 0.0
    count = math.prod(row.get("shape_benchmark") or [1])
    unit = UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    return float(abs(after / before - 1.0)) / (_SUM + 4.0 * unit / math.sqrt(count))
