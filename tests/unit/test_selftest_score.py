"""Is a diagnosis scored against its declaration as the scoreboard claims?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.faults.declare import Declaration, declaration
from rlprobe.selftest import benign, fault
from rlprobe.selftest.catalogue import Case
from rlprobe.selftest.results import Result, Scores, Weaker
from rlprobe.selftest.score import FAILED, Found, Right, Tally, expected, upper_bound
from rlprobe.selftest.scoreboard import render

MODULE = "model.layers.0.mlp"


def _declared(**changes: Any) -> Declaration:
    arguments = {"stage": "actor_update", "module": MODULE, "cause": ("mask", "layout"), **changes}

    @fault(**arguments)
    def planted(site: Any) -> Any:
        yield

    found = declaration(planted)
    assert found is not None
    return found


def _found(**changes: Any) -> Found:
    values = {
        "verdict": "diverged",
        "stage": "actor_update",
        "module": MODULE,
        "cause": "layout",
        "ratio": 50.0,
        **changes,
    }
    return Found(**values)


def _result(found: Found, declared: Declaration | None = None, **further: Any) -> Result:
    return Result(Case(declared or _declared(), Path("faults.py")), found, 1.0, **further)


def _benign(*verdicts: str | Found, **further: Any) -> Result:
    @benign()
    def harmless(site: Any) -> Any:
        yield

    declared = declaration(harmless)
    assert declared is not None
    first, *others = (v if isinstance(v, Found) else Found(v) for v in verdicts)
    return Result(
        Case(declared, Path("benign.py")), first, 1.0, seeds=dict(enumerate(others)), **further
    )


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, Right(True, True, True, True)),
        ({"cause": "mask"}, Right(True, True, True, True)),
        ({"cause": "unknown"}, Right(True, True, True, False)),
        ({"module": f"{MODULE}.up_proj"}, Right(True, True, False, True)),
        ({"module": None}, Right(True, True, False, True)),
        # the right module of another stage is not right
        ({"stage": "critic_update"}, Right(True, False, False, True)),
        # without the verdict nothing counts: an alarm for another reason is no find
        ({"verdict": "not_comparable"}, Right(False, False, False, False)),
        ({"verdict": "aligned", "stage": None}, Right(False, False, False, False)),
    ],
)
def test_each_part_of_a_diagnosis_is_judged_on_its_own(
    changes: dict[str, Any], right: Right
) -> None:
    assert Right.of(_declared(), _found(**changes)) == right


def test_a_fault_of_no_module_wants_none_named() -> None:
    declared = _declared(module=None)
    assert Right.of(declared, _found(module=None)).module
    assert not Right.of(declared, _found()).module


@pytest.mark.parametrize(
    ("alarms", "runs", "bound"),
    # scipy.stats.beta.ppf(0.95, alarms + 1, runs - alarms)
    [(0, 60, 0.048703), (0, 1, 0.95), (1, 60, 0.076620), (3, 60, 0.124179), (10, 10, 1.0)],
)
def test_the_bound_on_false_alarms_is_clopper_pearsons(
    alarms: int, runs: int, bound: float
) -> None:
    assert upper_bound(alarms, runs) == pytest.approx(bound, rel=1e-3)


def test_no_bound_follows_from_no_runs() -> None:
    with pytest.raises(ValueError, match="0 alarms in 0 runs"):
        upper_bound(0, 0)


def test_bars_are_all_stages_nine_in_ten_modules_and_eight_in_ten_causes() -> None:
    assert Tally(20, 20, 20, 18, 16).shortfalls() == []
    assert len(Tally(20, 20, 19, 17, 15).shortfalls()) == 3
    assert Tally(0, 0, 0, 0, 0).shortfalls() == []


def test_a_weakened_fault_that_is_missed_falls_short() -> None:
    scores = Scores.of(
        [_result(_found(), weakened=Weaker(0.01, Found("aligned"))), _benign("aligned")]
    )
    assert (scores.full.stage, scores.weakened.stage) == (1, 0)
    assert any("weakened: stage" in line for line in scores.shortfalls())


def test_a_fault_that_cannot_be_weakened_is_listed_and_not_counted() -> None:
    result = _result(_found(), weakened=Weaker(1.0, None, "it ignores its strength"))
    scores = Scores.of([result])
    assert scores.weakened.total == 0
    assert scores.not_scalable == {"planted": "it ignores its strength"}
    assert "it ignores its strength" in render([result], scores, 1.0)


def test_every_benign_run_counts_towards_the_false_alarms() -> None:
    scores = Scores.of([_benign("aligned", "aligned", "diverged", "not_comparable")])
    assert (scores.alarms, scores.benign) == (2, 4)
    assert scores.shortfalls() == ["2 of 4 benign runs alarmed"]


def test_a_benign_run_that_failed_is_no_alarm_and_no_pass() -> None:
    scores = Scores.of([_benign("aligned", FAILED, "aligned")])
    assert (scores.alarms, scores.benign, scores.failed) == (0, 2, 1)
    assert scores.shortfalls() == ["1 benign runs failed and were not judged"]


def test_a_pipeline_that_failed_is_a_miss_with_its_reason() -> None:
    result = _result(Found(FAILED), error="target: verl ended with exit status 1")
    scores = Scores.of([result])
    assert scores.full.verdict == 0
    assert "exit status 1" in render([result], scores, 1.0)
    assert result.as_dict()["error"] == "target: verl ended with exit status 1"


def test_the_file_says_what_was_expected_and_found() -> None:
    row = _result(_found(ratio=float("inf"))).as_dict()
    assert row == {
        "name": "planted",
        "expected": {
            "verdict": "diverged",
            "stage": "actor_update",
            "module": MODULE,
            "cause": ["mask", "layout"],
        },
        "found": {
            "verdict": "diverged",
            "stage": "actor_update",
            "module": MODULE,
            "cause": "layout",
            "known": None,
        },
        "ratio": "inf",
        "seconds": 1.0,
    }
    assert expected(_declared(cause="mask"))["cause"] == "mask"


def test_the_scoreboard_shows_misses_and_the_bound() -> None:
    results = [_result(_found(module=None)), _benign(*["aligned"] * 60)]
    text = render(results, Scores.of(results), 12.0)
    assert "0 of 60 benign runs; the rate is below 4.9 % at 95 %" in text
    assert f"declared diverged, actor_update, {MODULE}, mask or layout; found diverged" in text


def test_a_benign_change_that_alarmed_is_told_with_what_it_alarmed_of() -> None:
    """Stage, module, cause and ratio, of whichever of its runs it was."""
    alarm = _found(cause="routing", ratio=43612.6)
    results = [_benign(alarm), _benign("aligned", "aligned", alarm), _benign("aligned")]
    results.append(_benign("aligned", tensors=_found(verdict="not_comparable", ratio=None)))
    text = render(results, Scores.of(results), 1.0)
    said = f"declared aligned; found diverged, actor_update, {MODULE}, routing, ratio 4.36e+04"
    assert text.partition("not as declared:\n")[2].splitlines() == [
        f"  harmless: {said}",
        f"  harmless with seed 1: {said}",
        f"  harmless with tensors: declared aligned; found not_comparable, actor_update, {MODULE}, "
        "layout, ratio -",
    ]
    row = results[1].as_dict()["seeds"][1]
    assert (row["found"]["module"], row["found"]["cause"]) == (MODULE, "routing")
    assert (row["found"]["stage"], row["ratio"]) == ("actor_update", 43612.6)


def test_a_benign_change_that_failed_is_told_with_its_reason() -> None:
    results = [_benign(FAILED, error="target: verl ended with exit status 1"), _benign("aligned")]
    text = render(results, Scores.of(results), 1.0)
    assert "not as declared:\n  harmless: target: verl ended with exit status 1" in text


def test_a_benign_change_that_is_aligned_is_not_among_what_is_not_as_declared() -> None:
    results = [_benign("aligned", "aligned", tensors=Found("aligned"))]
    assert "not as declared" not in render(results, Scores.of(results), 1.0)


@pytest.mark.parametrize(
    ("step", "right"), [(0, False), (1, False), (2, True), (3, True), (None, False)]
)
def test_a_stage_before_the_one_planted_in_is_no_find(step: int | None, right: bool) -> None:
    """What parts before the fault is there is something else, whatever it is called."""
    found = Right.of(_declared(), _found(step=step), planted=2)
    assert (found.verdict, found.stage, found.module) == (True, right, right)
    assert Right.of(_declared(), _found(step=step)).module, "nothing is asked of the first step"
    result = _result(_found(step=step), step=2)
    assert result.right(result.full).stage == right
    assert result.as_dict()["step"] == 2


def test_a_wrong_class_is_told_apart_from_an_unknown_one_by_how_it_is_known() -> None:
    """A wrong class sends somebody to the wrong place; unknown sends nobody anywhere."""
    unknown = _found(cause="unknown", known="unknown")
    wrong = _found(cause="routing", known="observed")
    right = _found(cause="mask", known="observed")
    results = [
        _result(unknown, refined=right), _result(unknown, refined=wrong), _result(wrong),
    ]  # fmt: skip
    scores = Scores.of(results)
    assert scores.known["full strength"] == {
        "unknown": 2, "observed": 1, "wrong class asserted": 1, "wrong class asserted, observed": 1,
    }  # fmt: skip
    assert scores.known["refined"]["wrong class asserted"] == 1
    text = render(results, scores, 1.0)
    rows = [line.split() for line in text.splitlines()[1:4]]
    assert [row[4:6] for row in rows[:2]] == [["unknown", "ok,"], ["unknown", "WRONG"]]
    assert "WRONG (routing), observed" in text and rows[2][4:6] == ["WRONG", "(routing)"]
    assert "refined: observed 2, wrong class asserted 1, wrong class asserted, observed 1" in text
    assert sum("a wrong class was asserted of 1 faults" in s for s in scores.shortfalls()) == 2
