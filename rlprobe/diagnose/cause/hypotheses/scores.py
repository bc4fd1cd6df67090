"""Probabilities of scores that were all multiplied by one number before the softmax.

If log t = a log b + a constant of each row, the scores are a times the benchmark's: another softmax
scale, an exponential of another base, or another temperature, whichever operators compute it.
"""

from __future__ import annotations

import numpy as np

from rlprobe.diagnose.cause.differences import Array, Tensors
from rlprobe.diagnose.cause.hypotheses.factor import tensor_residual
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.said import say

#: By how much a row of probabilities may miss 1 in sum, as 16 bits have them.
_SUM = 1e-2
#: Probabilities below are not told from 0.
_LEAST = 1e-12


class OfTensors:
    """One factor of all scores, fitted to every row of probabilities."""

    needs = Tensors

    def fit(self, difference: Tensors) -> Fit | None:
        """Least squares of logarithms about each row's mean, weighed by the probabilities."""
        b, t = difference.benchmark, difference.target
        if not (_are_probabilities(b) and _are_probabilities(t)):
            return None
        both = (b > _LEAST) & (t > _LEAST)
        weights = np.where(both, b, 0.0)
        x, y = (_centred(np.log(np.where(both, each, 1.0)), weights) for each in (b, t))
        spread = float(np.sum(weights * x * x))
        if not spread:
            return None
        factor = float(np.sum(weights * x * y)) / spread
        raised = np.where(b > _LEAST, np.maximum(b, _LEAST) ** factor, 0.0)
        model = raised / raised.sum(axis=1, keepdims=True)
        square = float(np.sum(difference.difference**2))
        if not square or not np.isfinite(model).all():
            return None
        share = float(np.sum((t - model) ** 2)) / square
        said = say(
            "the scores are {factor:.6g} times the benchmark's before the softmax: that explains "
            "{share:.2%} of the difference of the probabilities",
            factor=factor,
            share=1 - share,
        )
        residual = tensor_residual(difference, difference.left(model), share)
        return Fit("hyperparameter", (said,), residual, {"factor": factor}, left=share)


def _are_probabilities(rows: Array) -> bool:
    sums = rows.sum(axis=1)
    return rows.shape[1] > 1 and bool((rows >= 0).all() and (np.abs(sums - 1) < _SUM).all())


def _centred(values: Array, weights: Array) -> Array:
    total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    found: Array = values - (weights * values).sum(axis=1, keepdims=True) / total
    return found
