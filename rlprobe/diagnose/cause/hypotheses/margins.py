"""An engine that samples at another temperature: all margins are the same multiple.

log p(a) - log p(b) = (z_a - z_b) / T: the normaliser falls out. Where both sides' likeliest two
tokens are the same, the margin between them is the benchmark's times T_b / T_t, at every token.
"""

from __future__ import annotations

import numpy as np

from rlprobe.diagnose.cause.differences import Margins
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.said import say

#: Fewer margins tell no law.
_FEW = 8
#: What a multiple may leave over what noise explains: two log-probs have a margin.
_TWO = 2.0
#: The share of margins, the worst, that are not looked at: the second likeliest token may be
#: another one on either side.
_OTHER_PAIRS = 0.1


class OfTemperature:
    """One factor explains the margins of all tokens."""

    needs = Margins

    def fit(self, difference: Margins) -> Fit | None:
        """Fit the factor, by medians; only where it is no 1."""
        b, t = difference.benchmark, difference.target
        known = np.isfinite(b) & np.isfinite(t) & (b > _TWO * difference.noise)
        b, t = b[known], t[known]
        if len(b) < _FEW:
            return None
        ratio = float(np.median(t / b))
        left = np.sort(np.abs(t - ratio * b))[: max(1, int(len(b) * (1 - _OTHER_PAIRS)))]
        size = float(np.sqrt(np.mean(b * b)))
        if not ratio > 0 or abs(ratio - 1.0) * size <= _TWO * _TWO * difference.noise:
            return None
        said = say(
            "the margins between the two likeliest tokens are {ratio:.4g} times the benchmark's at "
            "{count} tokens: the target samples at {temperature:.4g} times the benchmark's "
            "temperature",
            ratio=ratio,
            count=len(left),
            temperature=1.0 / ratio,
        )
        allowed = _TWO * difference.noise * max(1.0, ratio)
        residual = float(np.sqrt(np.mean(left * left))) / allowed if allowed else 0.0
        return Fit("sampling_semantics", (said,), residual, {"temperature": 1.0 / ratio})
