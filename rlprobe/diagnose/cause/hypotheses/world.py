"""Gradients reduced over the ranks otherwise: by the number of processes, or each rank by its own.

The factor is no choice: it is the size of the world, which is known.
"""

from __future__ import annotations

import math

from rlprobe.diagnose.cause.differences import Parameters
from rlprobe.diagnose.cause.hypotheses import factor
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge import origin as kinds
from rlprobe.said import say

#: A factor is that of the world's size within this share.
_WHOLE = 1e-3


class Size:
    """All gradients differ by the world's size, its inverse or its root."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """Compare the common factor with the world's."""
        size = difference.world_size
        if size < 2 or difference.kind in (kinds.CLIPPING, kinds.WEIGHT_GRADIENT):
            return None
        found = factor.common(difference.rows)
        if found is None or not found.is_of_all:
            return None
        off = min(abs(found.factor / n - 1.0) for n in (size, 1 / size, math.sqrt(size)))
        said = say(
            "{every} are {factor:.4g} times the benchmark's, and the world has "
            "{world_size} processes: as with a sum where a mean is due, or the other way "
            "round",
            every=found.of_what(say("gradients that differ")),
            factor=found.factor,
            world_size=size,
        )
        return Fit("reduction", (said,), off / _WHOLE)


class Ranks:
    """After clipping, one factor for each rank: each is clipped by a norm of its own."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """What the ranks' factors say."""
        if difference.of_ranks is None or difference.kind != kinds.CLIPPING:
            return None
        low, high = difference.of_ranks
        said = say(
            "gradients after clipping are {low:.6g} to {high:.6g} times the "
            "benchmark's, one factor a rank: they are clipped by a norm of their own",
            low=low,
            high=high,
        )
        return Fit("reduction", (said,), 0.0, {"lowest": low, "highest": high})


class Reduced:
    """Each process's gradients agree before the reduction and not after it."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """Whether both are known."""
        if difference.kind != kinds.REDUCTION or difference.world_size < 2:
            return None
        if not difference.first_agrees:
            return None
        said = say(
            "each process's gradients agree before they are reduced over the ranks, and not after"
        )
        return Fit("reduction", (said,), choices=_LAST)


#: What has no law but where it parts is said where no law of numbers is: it costs more than any.
_LAST = 9
