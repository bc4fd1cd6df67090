"""Is the gap between training and rollout log-probs measured as published?"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from rlprobe.diagnose import mismatch
from rlprobe.diagnose.mismatch import Mismatch
from rlprobe.dumps.key_data import Row
from rlprobe.store.read import Run

Rows = dict[str, list[float]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures log-probs of samples as a run holds them among its key data."""

    def run(trained: Rows, generated: Rows, mask: Rows | None = None) -> Mismatch | None:
        held = {mismatch.TRAINED: trained, mismatch.GENERATED: generated,
                mismatch.MASKS[0]: mask or {}}  # fmt: skip

        def load(_: Run, name: str, step: int) -> list[Row]:
            assert step == 3
            return [
                Row(sample, np.array(values, np.float32), 0, 0)
                for sample, values in held.get(name, {}).items()
            ]

        monkeypatch.setattr("rlprobe.diagnose.mismatch.keydata.load", load)
        return mismatch.measure(cast("Run", None), 3)

    return run


def test_mean_largest_and_both_estimates_of_kl(measure: Any) -> None:
    found = measure({"a": [-1.0, -2.0], "b": [-0.5]}, {"b": [-0.75], "a": [-1.5, -1.0]})
    d = np.array([0.5, -1.0, 0.25])
    assert (found.tokens, found.samples) == (3, 2)
    assert found.mean_abs == pytest.approx(np.abs(d).mean())
    assert found.max_abs == pytest.approx(1.0)
    assert found.k1 == pytest.approx(-d.mean())
    assert found.k3 == pytest.approx((np.exp(d) - d - 1).mean())
    assert found.multiplicative == pytest.approx(np.exp(np.abs(d)).mean())
    assert found.by_position == pytest.approx([(0.5 + 0.25) / 2, 1.0])


def test_of_a_whole_sequence_the_responses_part_counts(measure: Any) -> None:
    """Position i has the log-prob of token i + 1, and the last nothing of meaning."""
    found = measure({"a": [-9.0, -9.0, -1.0, -2.0, -9.0]}, {"a": [-1.25, -2.0]})
    assert found.by_position == pytest.approx([0.25, 0.0])


def test_equal_log_probs_have_no_gap(measure: Any) -> None:
    found = measure({"a": [-1.0, -2.0]}, {"a": [-1.0, -2.0]})
    assert (found.mean_abs, found.max_abs, found.k1, found.k3) == (0.0, 0.0, 0.0, 0.0)


def test_what_is_not_finite_is_left_out_where_it_stands(measure: Any) -> None:
    found = measure({"a": [float("nan"), -2.0], "b": [-1.0, -2.0]}, {"a": [-1, -1], "b": [-1, -1]})
    assert found.tokens == 3
    assert found.by_position == pytest.approx([0.0, 1.0])


@pytest.mark.parametrize(
    ("trained", "generated"),
    [({}, {"a": [-1.0]}), ({"a": [-1.0]}, {}), ({"a": [-1.0]}, {"b": [-1.0]}),
     ({"a": [-1.0]}, {"a": [-1.0, -2.0]})],
)  # fmt: skip
def test_without_both_log_probs_of_a_sample_nothing_is_said(
    measure: Any, trained: Rows, generated: Rows
) -> None:
    assert measure(trained, generated) is None


NAN, INF = float("nan"), float("inf")


def test_a_tools_tokens_do_not_count(measure: Any) -> None:
    """Mask 0 and a log-prob of 0.0 inside the response, as an agent loop leaves them."""
    own, theirs = {"a": [-1.0, -2.0, -3.0]}, {"a": [-1.5, 0.0, -3.0]}
    found = measure(own, theirs, {"a": [1, 0, 1]})
    assert (found.tokens, found.masked) == (2, 1)
    assert found.mean_abs == pytest.approx(0.25)
    assert measure(own, theirs).mean_abs == pytest.approx(2.5 / 3), "without a mask all count"


@pytest.mark.parametrize(
    ("own", "theirs", "mask", "counted"),
    [
        ([-1.0, NAN], [-1.0, -2.0], [1, 1], (1, 0, 1, 0)),
        ([-1.0, -2.0], [NAN, -INF], [1, 1], (0, 0, 0, 2)),
        ([NAN, -2.0], [NAN, -2.0], [1, 1], (1, 0, 1, 1)),
        ([NAN, -2.0], [-INF, -2.0], [0, 1], (1, 1, 0, 0)),  # what is masked lacks nothing
        ([-INF, -2.0], [-INF, -2.0], [1, 1], (1, 0, 1, 1)),
    ],
)
def test_tokens_without_a_finite_log_prob_are_counted_on_either_hand(
    measure: Any, own: list[float], theirs: list[float], mask: list[float], counted: Any
) -> None:
    found = measure({"a": own}, {"a": theirs}, {"a": mask})
    assert counted == (
        found.tokens, found.masked, found.trained_nonfinite, found.generated_nonfinite
    )  # fmt: skip
    assert np.isnan(found.mean_abs) == (found.tokens == 0)


def test_a_sample_that_occurs_twice_meets_itself_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its occurrences have masks and log-probs of their own."""
    held = {
        mismatch.TRAINED: [-1.0, -2.0],
        mismatch.GENERATED: [-1.5, -2.25],
        mismatch.MASKS[0]: [1.0, 0.0],
    }

    def load(_: Run, name: str, step: int) -> list[Row]:
        return [Row("a", np.array([value]), 0, 0) for value in held.get(name, [])]

    monkeypatch.setattr("rlprobe.diagnose.mismatch.keydata.load", load)
    found = mismatch.measure(cast("Run", None), 3)
    assert found is not None
    assert (found.samples, found.tokens, found.masked) == (2, 1, 1)
    assert found.mean_abs == pytest.approx(0.5)


def test_tails_ratios_and_perplexities_are_of_the_same_tokens(measure: Any) -> None:
    trained, generated = [-1.0, -2.0, -0.5, -3.0], [-1.5, -1.0, -0.5, -9.0]
    found = measure({"a": trained}, {"a": generated}, {"a": [1, 1, 1, 0]})
    d = np.array([0.5, -1.0, 0.0])
    assert found.p99_abs == pytest.approx(np.quantile(np.abs(d), 0.99))
    assert found.ratio_low == pytest.approx(np.exp(np.quantile(d, 0.01)))
    assert found.ratio_high == pytest.approx(np.exp(np.quantile(d, 0.99)))
    assert found.perplexity_trained == pytest.approx(np.exp(3.5 / 3))
    assert found.perplexity_generated == pytest.approx(np.exp(1.0))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two runs, by what their key data hold of the same samples."""

    def runs(*sides: dict[str, Rows]) -> list[Run]:
        def load(run: Any, name: str, step: int) -> list[Row]:
            return [
                Row(sample, np.array(values, np.float32), 0, 0, response_at=at)
                for sample, (values, at) in (
                    (sample, (values, 2 if name == mismatch.TRAINED else 0))
                    for sample, values in sides[run].get(name, {}).items()
                )
            ]

        monkeypatch.setattr("rlprobe.diagnose.mismatch.keydata.load", load)
        return [cast("Run", number) for number in range(len(sides))]

    return runs


#: Of a prompt of three tokens and a response of three, in the form that training has it.
WHOLE = [-9.0, -9.0, -1.0, -2.0, -3.0, -9.0]


def test_an_engine_that_was_led_through_a_part_is_held_against_that_part(held: Any) -> None:
    (run,) = held(
        {
            mismatch.TRAINED: {"a": WHOLE},
            mismatch.DECODE: {"a": [-1.5, -2.0]},
            mismatch.MASKS[0]: {"a": [1, 1, 0]},
        }
    )
    found = mismatch.measure(run, 0, mismatch.DECODE)
    assert found is not None and found.tokens == 2
    assert found.by_position == pytest.approx([0.5, 0.0])
    (longer,) = held({mismatch.TRAINED: {"a": WHOLE}, mismatch.DECODE: {"a": [-1.0] * 9}})
    assert mismatch.measure(longer, 0, mismatch.DECODE) is None, "more than the response has"


def test_what_the_device_moves_is_of_the_same_tokens_and_of_those_that_count(held: Any) -> None:
    other = [-7.0, -7.0, -1.5, -2.0, -4.0, -7.0]
    one, two = held(
        {mismatch.TRAINED: {"a": WHOLE}, mismatch.MASKS[0]: {"a": [1, 1, 0]},
         mismatch.PREFILL: {"a": [-1.0, -2.0]}},
        {mismatch.TRAINED: {"a": other}, mismatch.PREFILL: {"a": [-1.25, float("nan")]}},
    )  # fmt: skip
    assert mismatch.moved(one, two, 0, mismatch.TRAINED) == pytest.approx(0.25)
    assert mismatch.moved(one, two, 0, mismatch.PREFILL) == pytest.approx(0.25)
    assert mismatch.moved(one, two, 0, mismatch.DECODE) is None


def test_near_ties_are_a_share_of_the_tokens_that_an_engine_was_led_through(held: Any) -> None:
    (run, without) = held({"forced_prefill_margins": {"a": [0.5, 1e-6], "b": [2e-6, 0.1]}}, {})
    assert mismatch.near_ties(run, 0, 1e-5) == 0.5
    assert mismatch.near_ties(run, 0, 1e-7) == 0.0
    assert mismatch.near_ties(without, 0, 1.0) is None


@pytest.mark.parametrize(("ratio", "mixed"), [(0.5, 0.0), (0.7, 0.0), (1.3, 0.0), (0.7, 0.3)])
def test_an_engine_of_another_temperature_is_known_by_its_ratio(
    held: Any, ratio: float, mixed: float
) -> None:
    random = np.random.default_rng(1)
    logits = 2 * random.standard_normal((40, 120))
    tokens: list[int] = []
    sides: list[Any] = []
    entropies: list[float] = []
    for scale in (1.0, 1.0 / ratio):
        logs = scale * logits - np.log(np.exp(scale * logits).sum(-1, keepdims=True))
        if not tokens:
            tokens = [int(random.choice(120, p=np.exp(row))) for row in logs]
            entropies = (-(np.exp(logs) * logs).sum(-1)).tolist()
        sides.append(logs[np.arange(40), tokens])
    sides[1] += mixed * random.standard_normal(40)
    whole = [-9.0, -9.0, *sides[0].tolist(), -9.0]
    (run,) = held(
        {
            mismatch.TRAINED: {"a": whole},
            mismatch.PREFILL: {"a": sides[1].tolist()},
            "entropys": {"a": entropies},
        }
    )
    found = mismatch.temperature(run, 0, mismatch.PREFILL)
    assert found is not None and found.error is not None
    sharp = found.error <= 0.02 * abs(found.coefficient - 1)
    assert sharp == (mixed == 0.0)
    if sharp:
        assert found.coefficient == pytest.approx(ratio, abs=0.01)
