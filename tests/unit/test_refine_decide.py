"""Which of what was seen decides the cause."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlprobe import stages
from rlprobe.diagnose.diagnosis import Cause, Diagnosis, First
from rlprobe.refine import decide
from rlprobe.refine.refined import Refined
from rlprobe.refine.seen import Seen

LAW = "the target is 0.05 times the benchmark"


def refined(**given: Any) -> Refined:
    kept = {
        "benchmark": "b", "target": "t", "refining": ["c", "u"], "stage": "actor_update",
        "record": "r", "repeated": True, "kept": 2, "left_out": 0, "bytes": 8, "error": 0.9,
        "cause": "constant_factor", "law": LAW, "left": 0.0016, "evidence": [LAW], "tokens": [],
        "channels": [], "records": [],
    }  # fmt: skip
    return Refined(**{**kept, **given})


@pytest.mark.parametrize(
    ("floor", "of_record", "cause"),
    [
        (3.2, 1e-5, "unknown"),  # of a loss whose parts cancel, and of the gradient it sends back
        (3.2, None, "constant_factor"),
        (1e-5, None, "unknown"),
        (1e-5, 0.1, "constant_factor"),
    ],
)
def test_a_law_is_held_against_the_floor_of_its_own_record(
    monkeypatch: pytest.MonkeyPatch, floor: float, of_record: float | None, cause: str
) -> None:
    monkeypatch.setattr(decide, "_floor", lambda _: floor)
    monkeypatch.setattr(decide, "_said", lambda text, _: text)
    before = Cause("unknown", "unknown", "no law", [])
    found = decide._decided(before, refined(floor=of_record), None)  # type: ignore[arg-type]
    assert found.class_ == cause
    left = math.sqrt(0.0016) * 0.9 / (of_record or floor)
    assert cause == "unknown" or f"{left:.2g} of the noise floor is left" in found.statement


def test_what_was_given_and_seen_to_differ_comes_before_a_law() -> None:
    seen = Seen("data", "batch advantages differs by 0.96", [])
    before = Cause("data", "consistent", "what it was given differs", [])
    found = decide._decided(before, refined(observed=seen, floor=1.0), DIAGNOSIS)
    assert (found.class_, found.known) == ("data", "observed")


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ("position", "saturation"),
        ("position", "layout"),
        ("data", "constant_factor"),
        ("data", "layout"),
    ],
)
def test_a_law_of_what_came_in_otherwise_says_how_and_not_why(given: str, law: str) -> None:
    before = Cause(given, "consistent", "what it was given differs", [])
    found = decide._decided(before, refined(cause=law, left=0.0, floor=1.0), DIAGNOSIS)
    assert (found.class_, found.known) == (given, "reproduced")
    assert found.statement.startswith(LAW)


@pytest.mark.parametrize(
    ("phase", "said"), [("prefill", False), ("prompt", True), ("decode", True), (None, False)]
)
def test_of_a_forward_after_the_prefill_it_is_said_that_it_is_not_run_again(
    phase: Any, said: bool
) -> None:
    stage = stages.FORCED
    first = First(stage, 0, 0, "attn", 2, "attn (Attention)", None, None, {}, {}, phase)
    cause = Cause("unknown", "unknown", "no law", [])
    before = Diagnosis("diverged", "it parts.", [], first, cause, {}, {}, [])
    traced = refined(stage=stage, cause=None, observed=Seen("unknown", "", ["8 operators"]))
    after = decide.sharpen(before, traced, ("b", "t")).cause
    assert after is not None and "8 operators" in after.evidence
    assert any("not run again by itself" in line for line in after.evidence) is said


DIAGNOSIS: Any = type("D", (), {"noise": {"first": {"floor": 1.0}}, "messages": {}})()
