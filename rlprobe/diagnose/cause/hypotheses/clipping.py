"""All gradients clipped by one norm, but by another than the benchmark's: one factor for all."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Parameters
from rlprobe.diagnose.cause.hypotheses import factor
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.diagnose.cause.measure import times
from rlprobe.judge import origin as kinds
from rlprobe.said import say


class Norm:
    """One factor for all gradients after clipping that differ."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """Fit the factor; None before clipping, or where each rank or some have their own."""
        if difference.kind != kinds.CLIPPING or difference.of_ranks is not None:
            return None
        found = factor.common(difference.rows)
        if found is None or not found.is_of_all or found.factor < 0:
            return None  # a norm is never negative, so no clipping turns a gradient around
        if difference.spared(found.factor):
            return None  # nor does it leave any out
        said = say(
            "{every} after clipping are {factor} times the benchmark's: clipped at "
            "another norm, or by another one",
            every=found.of_what(say("gradients that differ")),
            factor=times(found.factor),
        )
        # another bound, or the norm itself put together otherwise: these numbers do not tell which
        return Fit("optimizer", (said,), 0.0, {"factor": found.factor})
