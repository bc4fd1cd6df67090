"""Which of several laws is believed, and when none is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlprobe.diagnose.cause.differences import Fact, Tensors, Tokens
from rlprobe.diagnose.cause.hypotheses import ALL
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, Fit, by_chance, fits, weigh
from rlprobe.said import exactly

RANDOM = np.random.default_rng(2)
B = RANDOM.standard_normal((40, 16))


def fit(cause: str, residual: float = 0.0, **parameters: float) -> Fit:
    return Fit(cause, (exactly(f"law of {cause}"),), residual, parameters)


def test_what_noise_does_not_explain_does_not_hold() -> None:
    assert weigh([fit("mask", 1.01)], [exactly("seen")]) == (UNKNOWN, ["seen"])
    assert weigh([fit("mask", 0.99)], [exactly("seen")]) == ("mask", ["seen", "law of mask"])


def test_parameters_cost() -> None:
    both = [fit("constant_factor", 0.1, factor=2.0), fit("reduction", 0.9)]
    assert weigh(both, []).cause == "reduction"
    assert weigh([*both, fit("data", 1.5)], []).cause == "reduction"


def test_a_tie_is_unknown_and_says_both() -> None:
    found = weigh([fit("mask", 0.1, a=1.0), fit("layout", 0.2, b=1.0)], [])
    assert found.cause == UNKNOWN
    assert "law of mask (mask); or law of layout (layout)" in found.said[-1]
    same = weigh([fit("mask", 0.1, a=1.0), fit("mask", 0.2, b=1.0)], [])
    assert same.cause == "mask"


def test_a_law_without_a_class_is_said_and_stands_in_the_way() -> None:
    lawful = [fit(UNKNOWN, 0.0), fit("mask", 0.0, a=1.0)]
    assert weigh(lawful, [exactly("seen")]) == (UNKNOWN, ["seen", "law of unknown"])
    assert weigh([fit(UNKNOWN, 0.0, a=1.0), fit("mask", 0.0)], []).cause == "mask"


def test_a_hypothesis_is_fitted_to_what_it_needs_alone() -> None:
    assert [f.cause for f in fits(ALL, [Fact("loss", (exactly("it is"),))])] == ["loss"]
    assert not fits(ALL, [object()])


def test_few_numbers_obey_a_law_by_chance() -> None:
    assert by_chance(4, 0.1) and by_chance(20, 0.1, candidates=10**6)
    assert not by_chance(40, 0.1, candidates=100)
    assert by_chance(1, 0.0) and not by_chance(2, 0.0)


Change = Callable[[np.ndarray], np.ndarray]
#: Elements tell: the class, and words of what is said.
ELEMENTS: dict[str, tuple[Change, str, str]] = {
    "factor": (lambda b: 1.5 * b, "constant_factor", "1.5 times"),
    "clipped": (lambda b: np.clip(b, -1, 1), "saturation", "cut off there"),
    "clipped above": (lambda b: np.minimum(b, 0.7), "saturation", "beyond 0.7"),
    "zeroed at random": (lambda b: np.where(RANDOM.random(b.shape) < 0.2, 0, b), UNKNOWN, "are 0"),
    "dropout": (
        lambda b: np.where(RANDOM.random(b.shape) < 0.1, 0, b / 0.9), UNKNOWN, "",
    ),
    "soft cap": (lambda b: 2 * np.tanh(b / 2), UNKNOWN, ""),
    "signs": (lambda b: np.where(RANDOM.random(b.shape) < 0.1, -b, b), UNKNOWN, ""),
    "noise": (lambda b: b + 0.01 * RANDOM.standard_normal(b.shape), UNKNOWN, ""),
    "half scaled": (lambda b: b * np.where(np.arange(16) < 8, 1.1, 1.0), UNKNOWN, ""),
    "transposed blocks": (
        lambda b: b.reshape(40, 2, 8).swapaxes(1, 2).reshape(b.shape), "layout", "channels",
    ),
    "samples": (lambda b: b[::-1], "row_order", "rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_tell_what_statistics_cannot(name: str) -> None:
    change, cause, words = ELEMENTS[name]
    found = weigh(fits(ALL, [Tensors(B, change(B))]), [])
    assert found.cause == cause, found
    assert words in " ".join(found.said)


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_a_factor_of_most_elements_is_none_of_all(share: float) -> None:
    """What the factor leaves, and not what it explains, is held against the floor."""
    wrong = 1.5 * B
    wrong[0, : int(16 * share) + 1] = 0.1
    left = fits(ALL, [Tensors(B, wrong, floor=1e-6)])
    assert weigh(left, []).cause == UNKNOWN
    assert weigh(fits(ALL, [Tensors(B, 1.5 * B, floor=1e-6)]), []).cause == "constant_factor"


def tokens(change: Change, rows: int = 6, long: int = 12) -> Tokens:
    pairs = []
    for row in range(rows):
        b = -np.random.default_rng(row).exponential(2.0, long)
        pairs.append((f"s{row}", b, change(b)))
    return Tokens("old_log_probs", pairs, 1e-6, measured=True)


def last_zero(b: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(b)) < len(b) - 2, b, 0.0)


def middle_zero(b: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(b)) == 4, 0.0, b)


@pytest.mark.parametrize(
    ("change", "cause"),
    [(last_zero, "label_or_mask_shift"), (middle_zero, UNKNOWN),
     (lambda b: np.maximum(b, -2.0), "saturation"), (lambda b: np.minimum(b, -1.0), "saturation"),
     (lambda b: b - np.log(4.0), "sampling_semantics"), (lambda b: b - 0.02, UNKNOWN),
     (lambda b: np.append(b[1:], b[-1]), "label_or_mask_shift"),
     (lambda b: b + 0.1 * RANDOM.standard_normal(b.shape), UNKNOWN),
     (lambda b: np.where(RANDOM.random(b.shape) < 0.5, b, -1.0), UNKNOWN)],
)  # fmt: skip
def test_laws_of_tokens_need_all_tokens(change: Change, cause: str) -> None:
    found = weigh(fits(ALL, [tokens(change)]), [])
    assert found.cause == cause, found


def near(change: Change, deviation: float) -> Tokens:
    """Log-probs of a model that knows next to nothing: all are near the same."""
    pairs = []
    for row in range(12):
        b = -5.7 + deviation * np.random.default_rng(row).standard_normal(16)
        pairs.append((f"s{row}", b, change(b)))
    return Tokens("old_log_probs", pairs, 1e-6, measured=True)


@pytest.mark.parametrize(
    ("change", "deviation", "words"),
    [(lambda b: 0.7 * b, 0.4, "tokens are 0.7 times the benchmark's"),
     (lambda b: b / 0.7, 0.1, "tokens are 1.42857 times the benchmark's"),
     (lambda b: 1.02 * b, 0.3, "tokens are 1.02 times the benchmark's"),
     (lambda b: 0.9 * b + 1e-6 * RANDOM.standard_normal(b.shape), 0.3, "are 0.9 times"),
     (lambda b: b - 1.719, 0.4, "are shifted alike, by -1.719 (standard error"),
     (lambda b: b + 0.01, 0.4, "are shifted alike, by 0.01 (standard error"),
     (lambda b: b - 1.719, 1e-6, "by -1.719, or all multiplied by 1.30158: they are too much"),
     (lambda b: 0.7 * b, 1e-6, "by 1.71, or all multiplied by 0.7: they are too much"),
     # neither of them: nearly log 6 in the mean, and no two alike
     (lambda b: b - np.log(6.0) + 0.1 * RANDOM.standard_normal(b.shape), 0.4, "and not alike"),
     (lambda b: 0.8 * b + 0.7 * np.cos(40 * b) / 10, 0.4, "")],
)  # fmt: skip
def test_a_shift_of_all_tokens_is_said_where_it_is_one(
    change: Change, deviation: float, words: str
) -> None:
    said = list(map(str, weigh(fits(ALL, [near(change, deviation)]), []).said))
    of_all = [line for line in said if "shifted" in line or "times the benchmark's" in line]
    assert of_all == [line for line in of_all if words and words in line]
    assert bool(of_all) is bool(words)


@pytest.mark.parametrize(
    ("mean", "cause"), [(-7.0, "sampling_semantics"), (-6.0, "sampling_semantics"), (-3.0, UNKNOWN)]
)
def test_log_probs_that_rise_are_not_mixed_with_the_mean_over_a_vocabulary(
    mean: float, cause: str
) -> None:
    drawn = near(lambda b: 0.8 * b + 0.2 * mean, 0.4)
    assert weigh(fits(ALL, [drawn]), []).cause == cause


@pytest.mark.parametrize("many", [2, 6])
def test_tokens_that_are_not_shifted_alike_are_not_counted_as_often(many: int) -> None:
    def scattered(b: np.ndarray) -> np.ndarray:
        return b - np.log(many) + 0.08 * np.random.default_rng(5).standard_normal(b.shape)

    assert weigh(fits(ALL, [near(scattered, 0.4)]), []).cause == UNKNOWN
    assert weigh(fits(ALL, [near(lambda b: b - np.log(many), 0.4)]), []).cause != UNKNOWN


def test_short_rows_lead_anywhere() -> None:
    """Of many short rows one points at another's by chance: that is no order of samples."""
    pairs = []
    for row in range(200):
        draw = np.random.default_rng(row)
        b = draw.standard_normal(4)
        pairs.append((f"s{row}", b, b + 0.3 * draw.standard_normal(4)))
    found = weigh(fits(ALL, [Tokens("values", pairs, 1e-6)]), [])
    assert found.cause == UNKNOWN, found
