"""Training against rollout, a row a step: is every figure that is asked for there, and right?"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlprobe.diagnose import engine_layers, mismatch, rollout
from rlprobe.diagnose.engine_layers import Block, Layers, Router
from rlprobe.dumps.key_data import Row
from rlprobe.judge import fits
from rlprobe.store.read import Run

#: name -> step -> values of one sample; of the benchmark and of the target.
Held = dict[str, dict[int, list[float]]]
BENCHMARK: Held = {
    mismatch.TRAINED: {0: [-1.0, -2.0, -3.0, -4.0], 1: [-1.0, -1.0, -1.0, -1.0]},
    mismatch.GENERATED: {0: [-1.1, -2.0, -3.0, -4.3], 1: [-1.0, -1.0, float("nan"), -1.5]},
    mismatch.PREFILL: {0: [-1.2, -2.0, -3.0, -4.0]},
    mismatch.DECODE: {0: [-1.2, -2.0]},
    "forced_prefill_margins": {0: [0.1, 2.0, 0.3, 5.0]},
    mismatch.MASKS[0]: {0: [1, 1, 0, 1]},
}
TARGET: Held = {
    mismatch.TRAINED: {0: [-1.0, -2.0, -3.0, -4.5], 1: [-1.0, -1.0, -1.0, -2.0]},
    mismatch.GENERATED: BENCHMARK[mismatch.GENERATED],
    mismatch.PREFILL: {0: [-1.2, -2.4, -3.0, -4.0]},
    mismatch.DECODE: {0: [-1.2, -2.0]},
    mismatch.MASKS[0]: BENCHMARK[mismatch.MASKS[0]],
}
LAYERS = {
    0: Layers(
        [Block("model.layers.0", 9, 1e-7, 2e-7, 1e-6), Block("model.layers.1", 9, 1.0, 2.0, 1e-6)],
        [Router("model.layers.0.mlp.gate", 9, 0), Router("model.layers.1.mlp.gate", 9, 4)],
    )
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> rollout.Rollout:
    def load(run: Any, name: str, step: int) -> list[Row]:
        values = run.held.get(name, {}).get(step)
        led = name in (mismatch.PREFILL, mismatch.DECODE, "forced_prefill_margins")
        whole = name == mismatch.TRAINED
        if values is None:
            return []
        return [
            Row("s", np.array(values, np.float32), 0, 0, response_at=0 if whole or led else None)
        ]

    monkeypatch.setattr("rlprobe.diagnose.mismatch.keydata.load", load)
    monkeypatch.setattr(engine_layers, "layers", lambda run: LAYERS if run.held is TARGET else {})
    one, other = (
        cast(Run, SimpleNamespace(held=held, manifest=SimpleNamespace(steps=[0, 1])))
        for held in (BENCHMARK, TARGET)
    )
    return rollout.of(one, other)


def test_every_step_side_and_engine_has_its_row(found: rollout.Rollout) -> None:
    rows = {(gap.step, gap.side, gap.against): gap.found for gap in found.gaps}
    assert set(rows) == {
        *((0, side, against) for side in ("benchmark", "target") for against in rollout.AGAINST),
        *((1, side, mismatch.GENERATED) for side in ("benchmark", "target")),
    }
    own = rows[0, "benchmark", mismatch.GENERATED]
    d = np.array([0.1, 0.0, 0.3])
    assert (own.tokens, own.masked) == (3, 1)
    assert own.mean_abs == pytest.approx(d.mean(), rel=1e-5)
    assert own.k1 == pytest.approx(-d.mean(), rel=1e-5)
    assert own.k3 == pytest.approx((np.exp(d) - d - 1).mean(), rel=1e-4)
    assert own.perplexity_trained == pytest.approx(np.exp((1 + 2 + 4) / 3), rel=1e-5)
    assert own.perplexity_generated == pytest.approx(np.exp((1.1 + 2 + 4.3) / 3), rel=1e-5)
    assert rows[1, "target", mismatch.GENERATED].generated_nonfinite == 1


def test_a_step_says_what_its_gap_is_made_of(found: rollout.Rollout) -> None:
    first, second = found.parts
    assert first.method == pytest.approx(0.4 / 3, rel=1e-5)
    assert first.training == pytest.approx(0.5 / 3, rel=1e-5), "masked tokens do not count"
    assert first.prefill == pytest.approx(0.1, rel=1e-5) and first.decode == 0.0
    assert first.near_ties == 0.5 and first.within == pytest.approx(2 * 0.296, rel=1e-3)
    assert second.method == pytest.approx(0.5 / 3, rel=1e-5)
    assert second.prefill is None and second.near_ties is None
    assert first.layers["target"].routed == (4, 18)
    assert first.layers["target"].begins is LAYERS[0].blocks[1]


def test_the_answer_has_all_of_it_as_plain_numbers(found: rollout.Rollout) -> None:
    values = json.loads(json.dumps(found.as_values(), allow_nan=False))
    first, second = values
    assert first["layers"] == {
        "target": {"blocks": 2, "begins": "model.layers.1", "routed_otherwise": 4, "routed": 18}
    }
    assert first["parts"]["near_ties"] == 0.5 and second["parts"]["near_ties"] is None
    assert {(gap["side"], gap["against"]) for gap in second["gaps"]} == {
        ("benchmark", mismatch.GENERATED), ("target", mismatch.GENERATED)
    }  # fmt: skip
    assert {
        "tokens", "samples", "mean_abs", "p99_abs", "max_abs", "k1", "k3", "multiplicative",
        "ratio_low", "ratio_high", "perplexity_trained", "perplexity_generated", "masked",
        "trained_nonfinite", "generated_nonfinite",
    } <= first["gaps"][0].keys()  # fmt: skip


def test_without_an_engines_log_probs_there_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlprobe.diagnose.mismatch.keydata.load", lambda *_: [])
    run = cast(Run, SimpleNamespace(manifest=SimpleNamespace(steps=[0])))
    assert rollout.of(run, run).as_values() == []


@pytest.mark.parametrize(
    ("ratio", "sampled", "answer"),
    [
        (1 / 0.7, 0.7, True),
        (0.8334, 1.2, True),
        # another temperature than the prompt's own
        (1.4, 0.7, False),
        (0.7, 0.7, False),
        # nothing recorded, greedy, or training at 1 itself
        (1 / 0.7, None, False),
        (1 / 0.7, 0, False),
        (1.0, 1.0, False),
    ],
)
def test_log_probs_of_a_prompt_are_at_temperature_1_whatever_was_sampled(
    ratio: float, sampled: object, answer: bool
) -> None:
    assert mismatch.of_prompts(fits.Fit(ratio, 1.0, 0.0002), sampled) is answer
