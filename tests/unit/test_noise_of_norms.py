"""How far may the norms of what two correct devices make be apart?

Behind many layers in 16 bits elements may differ by half of their size; a factor moves the norm,
and roundings do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.judge import noise
from tests.unit.noise_rows import BF16, chain

SIZE, DEPTH = 65_536, 800


def deep(
    benchmark: np.ndarray, target: np.ndarray, *, kind: str = "sketch", **last: Any
) -> dict[str, float]:
    """``noise``, ``ratio`` and the error of a record behind eight hundred products in 16 bits."""
    rows = chain(DEPTH, dtype=BF16)
    norm = float(np.linalg.norm(benchmark))
    rows[-1].update(
        error=float(np.linalg.norm(target - benchmark)) / norm,
        error_kind=kind,
        norm_benchmark=norm,
        norm_diff=float(np.linalg.norm(target)) - norm,
        max_benchmark=float(benchmark.max()),
        min_benchmark=float(benchmark.min()),
        **last,
    )
    found = noise.annotate(pl.DataFrame(rows, infer_schema_length=None)).row(-1, named=True)
    return {name: float(found[name]) for name in ("error", "noise", "ratio")}


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(SIZE)


def roundings(values: np.ndarray, size: float, seed: int = 2) -> np.ndarray:
    """What has no common sign, of a part of the values' norm."""
    drawn = np.random.default_rng(seed).standard_normal(values.shape)
    found: np.ndarray = drawn * size * np.linalg.norm(values) / np.linalg.norm(drawn)
    return found


@pytest.mark.parametrize("factor", [0.8, 0.75, 1.25, 0.9])
@pytest.mark.parametrize("kind", ["sketch", "tensor"])
def test_a_factor_within_the_floor_of_elements_is_beyond_that_of_the_norm(
    values: np.ndarray, factor: float, kind: str
) -> None:
    found = deep(values, factor * values, kind=kind)
    assert found["error"] < found["noise"]
    assert (found["ratio"] > 1) == (abs(factor - 1) > 0.15)


def test_a_factor_shows_beside_roundings(values: np.ndarray) -> None:
    found = deep(values, 0.75 * values + roundings(values, 0.1))
    assert found["error"] < found["noise"] < found["noise"] * found["ratio"]


@pytest.mark.parametrize("size", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_roundings_leave_the_norm_alone(values: np.ndarray, size: float, seed: int) -> None:
    """On the target, on the benchmark, and on both."""
    ours, theirs = roundings(values, size, 20 + seed), roundings(values, size, 40 + seed)
    for benchmark, target in (
        (values, values + ours),
        (values + ours, values),
        (values + theirs, values + ours),
    ):
        found = deep(benchmark, target)
        assert found["ratio"] == pytest.approx(found["error"] / found["noise"])


def test_few_elements_that_carry_a_norm_may_move_it(values: np.ndarray) -> None:
    """One element has a common sign with itself."""
    alone = values.copy()
    alone[0] = 1e4
    other = alone.copy()
    other[0] *= 0.75
    found = deep(alone, other)
    assert found["ratio"] == pytest.approx(found["error"] / found["noise"])
    assert found["ratio"] < 1


def test_statistics_alone_know_no_angle(values: np.ndarray) -> None:
    """Without a measured difference nothing says how much of the norm's it explains."""
    found = deep(values, 0.75 * values, kind="statistics")
    assert found["ratio"] == pytest.approx(found["error"] / found["noise"])


@pytest.mark.parametrize("slot", ["input", "output"])
def test_gradients_of_activations_are_judged_likewise(values: np.ndarray, slot: str) -> None:
    half = deep(values, 0.7 * values, direction="backward", slot=slot)
    assert half["error"] < half["noise"] < half["noise"] * half["ratio"]


def test_weights_are_the_gates_business(values: np.ndarray) -> None:
    found = deep(values, 0.75 * values, slot="parameters", index="weight")
    assert found["ratio"] == pytest.approx(found["error"] / found["noise"])
