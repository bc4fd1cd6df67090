"""What is said of the trainer's curves: their own verdict, and what a judged step says of one."""

from __future__ import annotations

from rlprobe.diagnose import sentence
from rlprobe.judge.curves import JOINED, LEFT, NOT_JUDGED, WITHIN, Curve


def curve(verdict: str, by: str = "controls", why: str = "") -> Curve:
    return Curve(metric=f"m{verdict}{by}", verdict=verdict, steps=2, by=by, why=why)  # type: ignore[arg-type]


def test_a_metric_that_a_judged_step_shows_is_no_curve() -> None:
    """Without any control no curve can leave anything."""
    found = [curve(NOT_JUDGED, why=JOINED), curve(LEFT, "records")]
    said = sentence.of_curves(found, 0)
    assert said.startswith(" Curves of 2 metrics over 2 steps: not judged (each step began from")
    assert said.endswith(
        " 1 of them differs in a judged step by more than what it is made of explains."
    )
    assert "perturbed" not in said


def test_both_are_said_where_both_are_known() -> None:
    found = [
        curve(WITHIN),
        curve(WITHIN),
        curve(LEFT),
        curve(LEFT, "records"),
        curve(LEFT, "records"),
    ]
    said = sentence.of_curves(found, 3)
    assert " against 3 perturbed runs: 2 of 5 metrics within, 1 left." in said
    assert " 2 of them differ in a judged step" in said


def test_without_such_a_metric_nothing_is_added() -> None:
    assert "judged step" not in sentence.of_curves([curve(WITHIN), curve(NOT_JUDGED)], 1)
