"""Engines led through the same responses: forwards, choices that part, other temperatures."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from rlprobe.diagnose import sentence
from rlprobe.diagnose.cause.differences import Margins
from rlprobe.diagnose.cause.hypotheses import ALL
from rlprobe.diagnose.cause.hypothesis import UNKNOWN, fits, weigh
from rlprobe.judge import forced, keydata
from rlprobe.judge.keydata import Row

#: Relative L2 difference of log-probs that round-off explains.
FLOOR = 1e-6
RANDOM = np.random.default_rng(7)


def run(*captured: dict[str, Any]) -> Any:
    return types.SimpleNamespace(
        manifest=types.SimpleNamespace(volatile={"captured": list(captured)})
    )


def line(phase: str, token: int, sample: str = "a", **changes: Any) -> dict[str, Any]:
    found = {"stage": "forced_generation", "step": 0, "rank": 0, "samples": [sample]}
    return found | {"forward": [phase, token]} | changes


def test_a_record_is_of_the_forward_that_its_number_says() -> None:
    told = run(
        line("prefill", 0),
        line("prefill", 0, step=1),
        line("prompt", 0, rank=1),
        {"stage": "actor_update", "step": 0, "rank": 0},
        line("decode", 1, sample="b"),
    )
    assert forced.forwards(told, 0, 0) == [
        forced.Forward("a", "prefill", 0),
        forced.Forward("b", "decode", 1),
    ]
    assert forced.forward_of(told, 0, 0, {"micro_batch": 1}) == forced.Forward("b", "decode", 1)
    assert forced.forward_of(told, 0, 0, {"micro_batch": 2}) is None
    assert forced.forward_of(told, 0, 0, {}) is None


@pytest.mark.parametrize("odd", [{"forward": "prefill"}, {"forward": [0, 1]}, {"samples": []}])
def test_a_line_of_elsewhere_that_says_something_odd_names_no_forward(odd: dict[str, Any]) -> None:
    assert forced.forwards(run(line("prefill", 0, **odd)), 0, 0) == []


def answered(
    moved: float = 1e-6, choices: list[int] | None = None, margins: list[float] | None = None
) -> dict[str, keydata.Difference]:
    """Two samples of four tokens; of the first the target chooses and leads otherwise."""
    logs = np.array([-1.0, -2.0, -0.5, -3.0])
    own = np.array([0.5, 0.4, 0.3, 2e-7])
    sides = {
        "log_probs": (logs, logs + moved),
        "choices": (np.array([5, 6, 7, 8]), np.array(choices or [5, 6, 7, 8])),
        "margins": (own, np.array(margins) if margins else own),
    }
    found = {}
    for what, (b, t) in sides.items():
        name = f"forced_decode_{what}"
        left, right = ([Row("a", first, 0, 0), Row("b", b, 0, 0)] for first in (b, t))
        found[name] = keydata.compare(left, right, name, 0)
    return found


def test_where_no_choice_parts_nothing_is_said() -> None:
    found = forced.choices(answered(), "decode", FLOOR)
    assert found is not None and (found.tokens, found.samples, found.partings) == (8, 2, ())
    assert sentence.of_choices([found]) == ""
    assert forced.choices(answered(), "prefill", FLOOR) is None


def test_a_choice_that_parts_within_what_log_probs_differ_by_is_a_near_tie() -> None:
    found = forced.choices(answered(1e-6, [5, 6, 7, 9], [0.5, 0.4, 0.3, 3e-7]), "decode", FLOOR)
    assert found is not None
    (parting,) = found.partings
    assert (parting.sample, parting.token, parting.benchmark, parting.target) == ("a", 3, 8, 9)
    assert parting.near_tie and parting.moved == pytest.approx(5e-7)
    assert "1 of 8 places, 1 of them near ties" in sentence.of_choices([found])


def test_a_choice_that_was_clear_and_parts_is_none() -> None:
    found = forced.choices(answered(1e-6, [5, 1, 2, 8], [0.5, 0.4, 1e-7, 2e-7]), "decode", FLOOR)
    assert found is not None
    assert [p.near_tie for p in found.partings] == [False, False]
    assert found.first["a"].token == 1, "the first of a sample"
    assert "2 of 8 places, 0 of them near ties" in sentence.of_choices([found])


def test_what_a_fault_moves_is_no_near_tie_however_far_it_moves_log_probs() -> None:
    found = forced.choices(answered(0.5, [5, 6, 1, 8], [0.5, 0.4, 0.2, 2e-7]), "decode", FLOOR)
    assert found is not None and found.largest == pytest.approx(0.5)
    assert [p.near_tie for p in found.partings] == [False]
    told = forced.choices(answered(1e-6, [5, 6, 7, 9], [0.5, 0.4, 0.3, 3e-7]), "decode", 0.0)
    assert told is not None and not told.partings[0].near_tie, "nothing says what round-off makes"


LEADS = RANDOM.exponential(1.0, 64)
NOISE = RANDOM.standard_normal(64)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        (LEADS / 0.7 + 1e-6 * NOISE, "sampling_semantics"),
        (LEADS * 0.999 + 1e-6 * NOISE, "sampling_semantics"),
        # a few tokens whose second likeliest is another one
        (np.where(np.arange(64) < 4, LEADS, LEADS / 0.7), "sampling_semantics"),
        (LEADS + 1e-6 * NOISE, UNKNOWN),
        (LEADS + 0.1, UNKNOWN),
        (LEADS * (1 + 0.3 * RANDOM.random(64)), UNKNOWN),
        (np.where(np.arange(64) < 20, LEADS, LEADS / 0.7), UNKNOWN),
    ],
)
def test_margins_that_are_one_multiple_are_another_temperature(
    target: np.ndarray, cause: str
) -> None:
    found = weigh(fits(ALL, [Margins(LEADS, target, 2e-6)]), [])
    assert found.cause == cause, found
    few = weigh(fits(ALL, [Margins(LEADS[:4], target[:4], 2e-6)]), [])
    assert few.cause == UNKNOWN, "a handful of margins tells no law"
