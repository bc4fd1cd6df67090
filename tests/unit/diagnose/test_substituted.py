"""With a suspect's outputs put right: what it still does inside is no second difference."""

from __future__ import annotations

from typing import Any

import pytest

from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import judge
from rlprobe.refine import decide, substitution
from rlprobe.refine.suspects import Plan
from rlprobe.spec import Suspects
from rlprobe.stages import LOG_PROB
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
#: Wrong inside, and handed on as if nothing were: what is put in place of a module's outputs.
PUT_RIGHT = {
    f"output {FIRST}.v_proj": lambda y: 2.0 * y,
    f"output {FIRST}.o_proj": lambda y: 0.5 * y,
}


def found(
    monkeypatch: pytest.MonkeyPatch, align: Align, faults: dict[str, Any], module: str = FIRST
) -> substitution.Substituted:
    results = align(Device(split=True, faults=PUT_RIGHT | faults), repeat=False).results
    monkeypatch.setattr(substitution, "_reported", lambda *_: (2, []))
    monkeypatch.setattr(substitution, "_compared", lambda *_: Results.open(results))
    suspects = Suspects(LOG_PROB, 0, 0, (module,), (), "r", trace="module", trace_module=module)
    return substitution._judged(results, Plan(suspects, "b", "t"), suspects, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("faults", "after"),
    [
        ({f"output {SECOND}.v_proj": lambda y: 2.0 * y}, f"{SECOND}.v_proj"),
        ({"output model.layers.1.mlp.act_fn": lambda y: 1.01 * y}, "model.layers.1.mlp.act_fn"),
        ({"output model.layers.0.mlp.up_proj": lambda y: 1.01 * y}, "model.layers.0.mlp.up_proj"),
        ({"output lm_head": lambda y: 1.01 * y}, "lm_head"),
    ],
)
def test_what_differs_behind_it_is_named(
    monkeypatch: pytest.MonkeyPatch, align: Align, faults: dict[str, Any], after: str
) -> None:
    told = found(monkeypatch, align, faults)
    assert (told.agrees, told.next_module) == (False, after), told.said
    assert f"{LOG_PROB} parts next at {after}" in told.said and "backward" not in told.said


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        # attention's own output, in the next layer too: the same code again
        ({f"output {SECOND}": lambda y: 1.01 * y}, f"parts again at {SECOND}, a "),
        ({"output lm_head": lambda y: 1.01 * y}, "There is a second difference in"),
        ({"output model.layers.1.mlp.act_fn": lambda y: 1.01 * y}, "There is a second difference"),
    ],
)
def test_the_same_code_again_is_not_called_a_second_difference(
    monkeypatch: pytest.MonkeyPatch, align: Align, faults: dict[str, Any], said: str
) -> None:
    told = found(monkeypatch, align, faults)
    parted = align(Device(split=True, faults={f"output {FIRST}": lambda y: 1.01 * y}))
    diagnosis = parted.diagnose()
    assert diagnosis.first is not None and diagnosis.first.module == FIRST, diagnosis.sentence
    assert said in str(decide._next(diagnosis, told))


def test_nothing_else_is_said_to_be_wrong_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch, align: Align
) -> None:
    told = found(monkeypatch, align, {})
    assert told.agrees is True and "nothing else is wrong in this stage" in told.said


def test_what_stands_beside_it_is_not_inside(monkeypatch: pytest.MonkeyPatch, align: Align) -> None:
    """Of a module whose path begins alike."""
    told = found(monkeypatch, align, {}, module=f"{FIRST}.v")
    assert told.next_module == f"{FIRST}.v_proj"


def test_the_finding_itself_keeps_what_differs(align: Align) -> None:
    results = align(Device(split=True, faults=PUT_RIGHT), repeat=False).results
    origin = judge(Results.open(results), 0).findings[LOG_PROB].origin
    assert origin is not None and origin.module == f"{FIRST}.v_proj"
