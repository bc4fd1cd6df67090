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


OTHERS = Seen("implementation", "the target runs aten::sort, which the benchmark does not", [])
#: Tensors that obey no law, none at all, one that holds but leaves 3 floors, and those of another
#: record than the one that parts.
NO_LAW: dict[str, Any] = {"cause": None, "law": "", "left": 1.0}
NO_TENSORS: dict[str, Any] = NO_LAW | {"error": None}
NEARLY: dict[str, Any] = {"left": 0.01, "error": 30.0}
OF_ANOTHER: dict[str, Any] = NO_LAW | {"floor": 1.0}


@pytest.mark.parametrize(
    ("law", "tensors", "class_", "known"),
    [
        ("constant_factor", NO_LAW, "implementation", "observed"),
        ("constant_factor", NEARLY, "implementation", "observed"),
        ("layout", NO_LAW, "implementation", "observed"),
        ("saturation", NO_LAW, "implementation", "observed"),
        ("constant_factor", NO_TENSORS, "constant_factor", "consistent"),
        ("layout", NO_TENSORS, "layout", "consistent"),
        ("saturation", NO_TENSORS, "saturation", "consistent"),
        ("constant_factor", OF_ANOTHER, "constant_factor", "consistent"),
        ("layout", NO_LAW | {"error": 0.0}, "layout", "consistent"),
        # laws that elements of one tensor do not tell of
        ("mask", NO_LAW, "mask", "consistent"),
        ("mask", NO_TENSORS, "mask", "consistent"),
        ("sampling_semantics", NO_LAW, "sampling_semantics", "consistent"),
        ("label_or_mask_shift", NO_LAW, "label_or_mask_shift", "consistent"),
        ("hyperparameter", NO_TENSORS, "hyperparameter", "consistent"),
        ("reduction", NO_LAW, "reduction", "consistent"),
        ("unknown", NO_LAW, "implementation", "observed"),
        ("rounding_order", NO_TENSORS, "implementation", "observed"),
        # what was recorded, and is no law
        ("data", NO_LAW, "data", "observed"),
        ("accumulation", NO_TENSORS, "accumulation", "observed"),
    ],
)
def test_a_law_is_not_observed_because_other_operators_ran(
    law: str, tensors: dict[str, Any], class_: str, known: str
) -> None:
    before = Cause(law, "unknown" if law == "unknown" else "consistent", "it obeys a law", [])
    found = decide._decided(before, refined(observed=OTHERS, **tensors), DIAGNOSIS)
    assert (found.class_, found.known) == (class_, known)
    assert ("it obeys a law" in found.statement) is (class_ != "implementation")
    assert OTHERS.statement in found.statement


def test_a_law_that_was_reproduced_or_recorded_is_known_as_before() -> None:
    before = Cause("constant_factor", "consistent", "it obeys a law", [])
    found = decide._decided(before, refined(observed=OTHERS, left=0.0), DIAGNOSIS)
    assert (found.class_, found.known) == ("constant_factor", "reproduced")
    told = Cause("hyperparameter", "observed", "it is told 2 instead of 1", [])
    found = decide._decided(told, refined(observed=OTHERS, **NO_LAW), DIAGNOSIS)
    assert (found.class_, found.known) == ("hyperparameter", "observed")


@pytest.mark.parametrize("tensors", [NO_LAW, NO_TENSORS])
def test_a_law_that_elements_do_not_obey_is_said_to_be_none(tensors: dict[str, Any]) -> None:
    first = First("actor_update", 0, 0, "mlp", 2, "mlp (MLP)", None, None, {}, {})
    cause = Cause("constant_factor", "consistent", "it obeys a law", ["it obeys a law"])
    noise = {"first": {"floor": 1e-6}}
    before = Diagnosis("diverged", "it parts.", [], first, cause, {}, noise, [])
    after = decide.sharpen(before, refined(observed=OTHERS, **tensors), ("b", "t")).cause
    assert after is not None
    said = [line for line in after.evidence if "the elements of r do not obey" in line]
    assert len(said) == (tensors is NO_LAW)


@pytest.mark.parametrize(
    ("seen", "law", "known"),
    [("optimizer", "reduction", "consistent"), ("layout", "row_order", "observed"),
     ("constant_factor", "reduction", "observed"), ("data", "row_order", "observed")],
)  # fmt: skip
def test_a_law_within_what_operators_mean_is_observed_with_them(
    seen: str, law: str, known: str
) -> None:
    before = Cause(law, "consistent", "it obeys a law", [])
    operators = Seen(seen, "the target runs aten::add", [])
    found = decide._decided(before, refined(observed=operators, **NO_LAW), DIAGNOSIS)
    assert (found.class_, found.known) == (law, known)


@pytest.mark.parametrize(
    ("operator", "known"), [("gradient reduction", True), ("gradients", False)]
)
def test_that_own_gradients_agree_before_a_reduction_is_seen(operator: str, known: bool) -> None:
    first = First("actor_update", 0, 0, None, 2, operator, None, None, {}, {})
    cause = Cause("reduction", "consistent", "they agree before", [])
    before = Diagnosis("diverged", "it parts.", [], first, cause, {}, {}, [])
    found = decide._decided(cause, refined(observed=OTHERS, **NO_LAW), before)
    assert (found.class_, found.known) == ("reduction", "observed" if known else "consistent")


DIAGNOSIS: Any = type(
    "D", (), {"noise": {"first": {"floor": 1.0}}, "messages": {}, "first": None}
)()
