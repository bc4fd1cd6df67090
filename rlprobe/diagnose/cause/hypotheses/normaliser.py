"""Log-probs of probabilities that are normalised otherwise, or of smoothed labels.

A sum over the vocabulary that counts everything n times moves every log-prob by -log n. A shift by
any other number, or a factor, is said and names no class: it is no distribution's. Where log-probs
are much alike a factor moves them alike too, so that the two are held against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlprobe.diagnose.cause.differences import Array, Tokens
from rlprobe.diagnose.cause.hypotheses.temperature import LEAVES, LOG_PROBS
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, Fit, by_chance
from rlprobe.diagnose.cause.measure import times
from rlprobe.judge import fits
from rlprobe.said import say

#: More shards of a vocabulary than this there are not.
_MOST = 64
#: A shift is the logarithm of a whole number within this share of it; of a difference no more than
#: this may be left by a law of all of it.
_EQUAL = 1e-4


class Constant:
    """All log-probs are shifted by one number."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """The number; None where one that multiplies says more."""
        found = _numbers(difference)
        if found is None or not fits.constant(difference.values) or found.multiplied:
            return None
        left = float(found.beside @ found.beside) / found.whole / LEAVES
        given = {"name": difference.name, "count": len(found.beside), "shift": found.shift}
        if not found.holds(found.beside):
            said = say(
                "{name} of all {count} tokens are shifted, by {shift:.4g} in the mean, and not "
                "alike (standard deviation {deviation:.2g})",
                **given,
                deviation=float(found.beside.std()),
            )
            return Fit(UNKNOWN, (said,), left, {"offset": found.shift})
        if found.holds(found.besides_factor):
            said = say(
                "{name} of all {count} tokens are shifted alike, by {shift:.4g}, or all "
                "multiplied by {factor}: they are too much alike to tell",
                **given,
                factor=times(found.factor),
            )
            return Fit(UNKNOWN, (said,), left, {"offset": found.shift})
        error = float(found.beside.std()) / math.sqrt(len(found.beside))
        said = say(
            "{name} of all {count} tokens are shifted alike, by {shift:.4g} (standard "
            "error {error:.1g})",
            **given,
            error=error,
        )
        times_counted = round(math.exp(abs(found.shift)))
        off = abs(abs(found.shift) - math.log(max(times_counted, 1)))
        if not 2 <= times_counted <= _MOST or off > max(3.0 * error, _EQUAL * abs(found.shift)):
            return Fit(UNKNOWN, (said,), left, {"offset": found.shift}, {"offset": error})
        how = say("as often") if found.shift < 0 else say("less often")
        said += say(
            ", log {times}: everything is counted {times} times {how}",
            times=times_counted,
            how=how,
        )
        return Fit("sampling_semantics", (said,), left, choices=1)


class Multiplied:
    """All log-probs are multiplied by one number: no distribution's are, whatever it is."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """The number; None where noise does not explain what it leaves."""
        found = _numbers(difference)
        if found is None or not found.multiplied or not found.holds(found.besides_factor):
            return None
        said = say(
            "{name} of all {count} tokens are {factor} times the benchmark's",
            name=difference.name,
            count=len(found.beside),
            factor=times(found.factor),
        )
        return Fit(UNKNOWN, (said,), 0.0, {"factor": found.factor})


@dataclass(frozen=True)
class _Numbers:
    """What one number that is added, or that multiplies, leaves of a difference of log-probs."""

    shift: float
    factor: float
    beside: Array
    besides_factor: Array
    whole: float
    #: What noise explains of all tokens together.
    noise: float

    def holds(self, left: Array) -> bool:
        """Whether what a law leaves is noise, or next to nothing of the difference."""
        return float(np.linalg.norm(left)) <= max(self.noise, _EQUAL * math.sqrt(self.whole))

    @property
    def multiplied(self) -> bool:
        """Whether a factor leaves less than a shift, which is more than noise."""
        less = np.linalg.norm(self.besides_factor) < np.linalg.norm(self.beside)
        return bool(less) and not self.holds(self.beside)


def _numbers(difference: Tokens) -> _Numbers | None:
    """Both fits; None of what is no log-probs of logits that agree, or not finite."""
    if difference.name not in LOG_PROBS or not difference.logits_agree or not difference.values:
        return None
    b = np.concatenate([own for own, _ in difference.values])
    d = np.concatenate([other for _, other in difference.values]) - b
    whole, square = float(d @ d), float(b @ b)
    if not (math.isfinite(whole + square) and whole > 0 and square > 0):
        return None
    by = float(b @ d) / square
    shift = float(d.mean())
    noise = difference.floor * math.sqrt(square)
    return _Numbers(shift, 1.0 + by, d - shift, d - by * b, whole, noise)


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
        # the mean over the vocabulary is no larger than that of even chances, and tokens that were
        # drawn are likelier: mixed with it they fall
        falls = sum(float(np.sum(t - b)) for b, t in values) < 0.0
        if not falls or by_chance(count, 1.0 - found.explained):
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
