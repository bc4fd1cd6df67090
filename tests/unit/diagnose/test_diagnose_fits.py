"""Are the laws that key data may follow recognised, also in part, and only when they hold?"""

from __future__ import annotations

import numpy as np
import pytest

from rlprobe.judge import fits

RANDOM = np.random.default_rng(0)
ROWS = [RANDOM.standard_normal(n) for n in (20, 24, 24, 31)]


def log_probs(logits: np.ndarray, labels: np.ndarray, temperature: float) -> list[np.ndarray]:
    """Log-probs of the labels and entropies."""
    scaled = logits / temperature
    every = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return [every[np.arange(len(labels)), labels], -(np.exp(every) * every).sum(-1)]


def sampled(count: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Logits, some flat and some peaked, and labels drawn from them."""
    logits = 3 * RANDOM.standard_normal((count, 50)) * RANDOM.uniform(0.3, 1.5, (count, 1))
    chances = np.exp(logits / 0.8)
    chances /= chances.sum(-1, keepdims=True)
    return logits, np.array([RANDOM.choice(50, p=row) for row in chances])


@pytest.mark.parametrize("temperature", [0.999, 0.9, 0.7, 1.4])
def test_a_temperature_is_measured_from_log_probs_and_entropies(temperature: float) -> None:
    logits, labels = sampled()
    (lb, hb), (lt, ht) = (log_probs(logits, labels, t) for t in (0.8, 0.8 * temperature))
    found = fits.temperature([(lb, lt)], [(hb, ht)])
    assert found is not None and found.explained > 0.99
    assert found.coefficient == pytest.approx(temperature, rel=0.01)
    ours = fits.temperature([(lb, lt)], [(hb, None)])
    assert ours is not None and ours.explained > 0.85
    # beyond first order, although only the benchmark's entropies are known
    assert ours.coefficient == pytest.approx(temperature, rel=0.02) and ours.error is not None
    assert abs(ours.coefficient - temperature) < 4 * ours.error + 1e-3 * abs(1 - temperature)
    assert ours.coefficient - 1 == pytest.approx(temperature - 1, rel=0.04)
    without = fits.temperature([(lb, lt)], None)
    assert without is not None and without.explained > 0.45 and without.error is None


def test_other_labels_are_no_temperature() -> None:
    logits, labels = sampled()
    (lb, hb), (lt, _) = (log_probs(logits, who, 0.8) for who in (labels, np.roll(labels, 1)))
    ours, without = fits.temperature([(lb, lt)], [(hb, None)]), fits.temperature([(lb, lt)], None)
    assert ours is not None and ours.explained < 0.7
    assert without is not None and without.explained < 0.4
    assert fits.temperature([(lb, lb)], [(hb, hb)]) is None


@pytest.mark.parametrize("places", [1, -1, 2, -2])
@pytest.mark.parametrize("share", [1.0, 0.95, 0.1, 1e-4])
def test_a_displacement_along_the_rows(places: int, share: float) -> None:
    pairs = [(row, row + share * (np.roll(row, -places) - row)) for row in ROWS]
    # values that another's is mixed into are nobody else's
    assert fits.shift(pairs) == (places if share > 0.9 else None)


def test_what_is_displaced_backwards_in_strength_is_none() -> None:
    assert fits.shift([(row, row - 0.5 * (np.roll(row, -1) - row)) for row in ROWS]) is None
    assert fits.shift([(row, 1.1 * row) for row in ROWS]) is None
    assert fits.shift([(row, row + RANDOM.standard_normal(len(row))) for row in ROWS]) is None
    assert fits.shift([(row, row) for row in ROWS]) is None


@pytest.mark.parametrize("share", [1.0, 0.95, 0.1, 1e-4])
def test_rows_of_other_samples(share: float) -> None:
    rows = [RANDOM.standard_normal(24) for _ in range(6)]
    names = [f"s{i}" for i in range(6)]
    moved = [row + share * (other - row) for row, other in zip(rows, rows[::-1], strict=True)]
    whole = 1.0 if share > 0.9 else 0.0
    assert fits.of_other_rows(list(zip(names, rows, moved, strict=True))) == whole
    half = [*moved[:1], *rows[1:5], RANDOM.standard_normal(24)]
    assert fits.of_other_rows(list(zip(names, rows, half, strict=True))) == (
        0.5 if share > 0.9 else 0
    )
    scaled = [1.01 * row for row in rows]
    assert fits.of_other_rows(list(zip(names, rows, scaled, strict=True))) == 0.0


LOG_PROBS = [np.log(np.random.default_rng(i).uniform(0.05, 0.9, 40)) for i in range(4)]


def test_a_normaliser_over_fewer_tokens_raises_all() -> None:
    assert fits.one_sided([(b, b + 0.01 * (1 + np.exp(b))) for b in LOG_PROBS])
    assert not fits.one_sided([(b, np.roll(b, 1)) for b in LOG_PROBS])
    assert not fits.one_sided([])


def test_another_normaliser_shifts_all_alike() -> None:
    assert fits.constant([(b, b - 0.2 + 0.01 * np.sin(b)) for b in LOG_PROBS])
    assert not fits.constant([(b, np.roll(b, 1)) for b in LOG_PROBS])
    assert not fits.constant([(b, b) for b in LOG_PROBS])


@pytest.mark.parametrize("share", [1e-4, 0.1])
def test_smoothed_labels_draw_log_probs_together(share: float) -> None:
    b = RANDOM.normal(-3.0, 2.0, 200)
    mean = RANDOM.normal(-6.0, 0.1, 200)
    found = fits.drawn_together([(b, (1 - share) * b + share * mean)])
    assert found is not None and found.explained > 0.95
    assert found.coefficient == pytest.approx(-share, rel=0.05)


def test_other_labels_do_not_draw_log_probs_together() -> None:
    b, other = RANDOM.normal(-3.0, 2.0, (2, 200))
    assert fits.drawn_together([(b, other)]) is None
    assert fits.drawn_together([(b, 0.9 * b + 0.1 * other)]) is None
    assert fits.drawn_together([(b, RANDOM.normal(-1.0, 0.1, 200))]) is None  # nearly constant
    assert fits.drawn_together([(b, b + 1.0)]) is None  # a shift is another law
