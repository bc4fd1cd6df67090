"""Gradients that are summed up over micro-batches otherwise: the first's agree, sums do not."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Parameters
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge import origin as kinds
from rlprobe.said import say

#: It has no law but where it parts, and is said where no law of numbers is.
_LAST = 10
#: Exponents of growth from which on the error grows with the micro-batches.
_GROWS = 0.25


class Summed:
    """The first micro-batch's gradients agree, and those summed up with later ones do not."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """Whether both are known."""
        if difference.kind in (kinds.CLIPPING, kinds.WEIGHT_GRADIENT):
            return None
        if not (difference.first_agrees and difference.later):
            return None
        said = say(
            "the first micro-batch's gradients agree, and those summed up with later ones do not"
        )
        if difference.growth is not None and difference.growth > _GROWS:
            said += say(
                "; their error grows with the micro-batches (exponent {growth:.2f})",
                growth=difference.growth,
            )
        return Fit("accumulation", (said,), choices=_LAST)
