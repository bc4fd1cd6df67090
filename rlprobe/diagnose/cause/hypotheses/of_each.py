"""A factor of each token's own, or one vector added to all: laws that name no class.

A norm with another epsilon multiplies each token by a factor, a bias left out takes the same vector
from each; so does much else, and the operators that ran tell which.
"""

from __future__ import annotations

import numpy as np

from rlprobe.diagnose.cause.differences import Tensors
from rlprobe.diagnose.cause.hypotheses.factor import tensor_residual
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, Fit
from rlprobe.said import say


class Factor:
    """Each token times a factor of its own."""

    needs = Tensors

    def fit(self, difference: Tensors) -> Fit | None:
        """Least squares row by row."""
        b, d = difference.benchmark, difference.difference
        square = float(np.sum(d * d))
        if b.shape[1] < 2 or not square:
            return None
        squares = np.sum(b * b, axis=1)
        by = np.where(squares > 0, np.sum(b * d, axis=1) / np.maximum(squares, 1e-300), 0.0)
        model = b * (1.0 + by[:, None])
        share = float(np.sum((difference.target - model) ** 2)) / square
        said = say(
            "each token is multiplied by a factor of its own, {low:.6g} to {high:.6g}: "
            "that explains {share:.2%} of the difference",
            low=1 + by.min(),
            high=1 + by.max(),
            share=1 - share,
        )
        residual = tensor_residual(difference, difference.left(model), share)
        return Fit(UNKNOWN, (said,), residual, choices=len(b), left=share)


class Offset:
    """One vector added to every token."""

    needs = Tensors

    def fit(self, difference: Tensors) -> Fit | None:
        """The mean over tokens."""
        d = difference.difference
        square = float(np.sum(d * d))
        if len(d) < 2 or not square:
            return None
        vector = d.mean(axis=0)
        share = float(np.sum((d - vector) ** 2)) / square
        said = say(
            "the same vector (norm {norm:.4g}) is added to every token: that explains "
            "{share:.2%} of the difference: as where a bias is left out or added twice",
            norm=np.linalg.norm(vector),
            share=1 - share,
        )
        left = difference.left(difference.benchmark + vector)
        residual = tensor_residual(difference, left, share)
        return Fit(UNKNOWN, (said,), residual, choices=d.shape[1], left=share)
