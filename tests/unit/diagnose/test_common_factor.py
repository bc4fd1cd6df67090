"""When many gradients are said to differ by one factor: each of them must be that multiple."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.cause.hypotheses import factor

Change = Callable[[np.ndarray, np.random.Generator, int], np.ndarray]


def gradients(change: Change, count: int = 11) -> pl.DataFrame:
    """Rows of gradients of which whole tensors were compared, each with a floor of 1e-6."""
    random = np.random.default_rng(3)
    rows = []
    for at in range(count):
        b = random.standard_normal(64)
        t = change(b, random, at)
        f = float(b @ t / (b @ b))
        rows.append({
            "norm_benchmark": float(np.linalg.norm(b)), "norm_target": float(np.linalg.norm(t)),
            "error": float(np.linalg.norm(t - b) / np.linalg.norm(b)), "error_kind": "tensor",
            "residual": float(np.linalg.norm(t - f * b) / np.linalg.norm(b)), "floor": 1e-6,
            "dtype_benchmark": "float32", "shape_benchmark": [64],
        })  # fmt: skip
    return pl.DataFrame(rows)


def at_its_norm(b: np.ndarray, t: np.ndarray) -> np.ndarray:
    found: np.ndarray = 0.7 * t * np.linalg.norm(b) / np.linalg.norm(t)
    return found


def test_one_factor_of_all_is_found() -> None:
    found = factor.common(gradients(lambda b, random, at: 0.7 * b))
    assert found is not None and found.is_of_all and found.factor == pytest.approx(0.7)


def test_one_that_is_another_multiple_is_not_counted() -> None:
    found = factor.common(gradients(lambda b, random, at: (0.9 if at == 4 else 0.7) * b))
    assert found is not None and (found.count, found.total) == (10, 11)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_other_numbers_of_that_norm_are_no_multiples(share: float) -> None:
    """Shuffled elements, and noise."""

    def shuffled(b: np.ndarray, random: np.random.Generator, at: int) -> np.ndarray:
        return 0.7 * (random.permutation(b) if at < share * 11 else b)

    def noisy(b: np.ndarray, random: np.random.Generator, at: int) -> np.ndarray:
        noise = 0.3 * random.standard_normal(b.shape) if at < share * 11 else 0.0
        return at_its_norm(b, b + noise)

    for change in (shuffled, noisy):
        found = factor.common(gradients(change))
        assert found is None or not found.is_of_all
        assert (found is None) == (share == 1.0)


def test_a_factor_of_each_is_not_one_of_all() -> None:
    found = factor.common(gradients(lambda b, random, at: 0.7 * (1 + 0.001 * (at - 5)) * b))
    assert found is None or not found.is_of_all


def test_changes_of_a_learning_rate_need_not_be_exact() -> None:
    """Decay comes on top of them."""
    rows = gradients(lambda b, random, at: 0.7 * (1 + 0.001 * (at - 5)) * b)
    found = factor.common_norm(rows)
    assert found is not None and found.is_of_all
