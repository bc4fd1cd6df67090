"""Probabilities of scores times a number are known as that, and others are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlprobe.diagnose.cause.differences import Tensors
from rlprobe.diagnose.cause.hypotheses.scores import OfTensors
from rlprobe.refine.look import look

Array = np.ndarray
RNG = np.random.default_rng(2)
SCORES = RNG.standard_normal((24, 16)) * 2
HIDDEN = np.triu(np.ones((24, 16), dtype=bool), 1)


def softmax(scores: Array) -> Array:
    scores = np.where(HIDDEN, -np.inf, scores)
    found: Array = np.exp(scores - scores.max(axis=1, keepdims=True))
    return found / found.sum(axis=1, keepdims=True)


RIGHT = softmax(SCORES)


@pytest.mark.parametrize("factor", [np.log(2), 1.25, 0.5, 1.001])
def test_a_factor_of_the_scores_is_found(factor: float) -> None:
    target = softmax(factor * SCORES) * (1 + 1e-7 * RNG.standard_normal(SCORES.shape))
    found = look(RIGHT, target)
    assert found.cause == "hyperparameter" and found.left < 1e-3
    assert f"scores are {factor:.3g}"[:14] in found.law


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: softmax(s + 0.3 * RNG.standard_normal(s.shape)),
        lambda s: softmax(np.tanh(s)),
        lambda s: softmax(s * RNG.uniform(0.5, 1.5, (len(s), 1))),
        lambda s: softmax(s - 0.2 * np.arange(16)),
        lambda s: 1.1 * softmax(s),
        lambda s: softmax(np.roll(s, 1, axis=1)),
    ],
)
def test_other_probabilities_are_of_no_such_factor(wrong: Callable[[Array], Array]) -> None:
    fit = OfTensors().fit(Tensors(RIGHT, wrong(SCORES)))
    assert fit is None or not fit.holds, fit


def test_what_are_no_probabilities_is_not_fitted() -> None:
    assert OfTensors().fit(Tensors(SCORES, 2 * SCORES)) is None
    assert OfTensors().fit(Tensors(RIGHT[:, :1] * 0 + 1, RIGHT[:, :1] * 0 + 1)) is None
