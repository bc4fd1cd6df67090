"""Log-probs of probabilities that are normalised otherwise, or of smoothed labels.

A sum over the vocabulary that counts everything n times moves every log-prob by -log n. A shift by
any other number is said and names no class: it is no distribution's.
"""

from __future__ import annotations

import math

import numpy as np

from rlprobe.diagnose.cause.differences import Tokens
from rlprobe.diagnose.cause.hypotheses.temperature import LEAVES, LOG_PROBS
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, Fit, by_chance
from rlprobe.diagnose.cause.measure import times
from rlprobe.judge import fits
from rlprobe.said import say

#: More shards of a vocabulary than this there are not.
_MOST = 64
#: A shift is the logarithm of a whole number within this share of it.
_EQUAL = 1e-4


class Constant:
    """All log-probs are shifted by one number."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """The number, with its standard error."""
        values = difference.values
        if difference.name not in LOG_PROBS or not difference.logits_agree:
            return None
        if not values or not fits.constant(values):
            return None
        d = np.concatenate([t - b for b, t in values])
        error = float(d.std()) / math.sqrt(len(d))
        shift = float(d.mean())
        said = say(
            "{name} of all {count} tokens are shifted alike, by {shift:.4g} (standard "
            "error {error:.1g})",
            name=difference.name,
            count=len(d),
            shift=shift,
            error=error,
        )
        whole = float(d @ d)
        left = float(np.sum((d - shift) ** 2)) / whole / LEAVES if whole else math.inf
        times_counted = round(math.exp(abs(shift)))
        off = abs(abs(shift) - math.log(max(times_counted, 1)))
        if not 2 <= times_counted <= _MOST or off > max(3.0 * error, _EQUAL * abs(shift)):
            return Fit(UNKNOWN, (said,), left, {"offset": shift}, {"offset": error})
        how = say("as often") if shift < 0 else say("less often")
        said += say(
            ", log {times}: everything is counted {times} times {how}",
            times=times_counted,
            how=how,
        )
        return Fit("sampling_semantics", (said,), left, choices=1)


class Smoothed:
    """A mixture of each log-prob with the mean over the vocabulary."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """The slope on the log-probs, beside a constant; entropies tell it from a temperature."""
        if difference.name not in LOG_PROBS or not difference.logits_agree:
            return None
        values = difference.values
        found = fits.drawn_together(values)
        if found is None or not difference.measured:
            return None
        count = sum(len(b) for b, _ in values)
        if by_chance(count, 1.0 - found.explained):
            return None
        said = say(
            "{name} are {factor} times the benchmark's and a constant "
            "({explained:.1%} of the difference): mixed with the mean over the "
            "vocabulary, as with smoothed labels",
            name=difference.name,
            factor=times(1.0 + found.coefficient),
            explained=found.explained,
        )
        return Fit(
            "sampling_semantics", (said,), (1.0 - found.explained) / LEAVES,
            {"slope": found.coefficient, "constant": 0.0},
        )  # fmt: skip
