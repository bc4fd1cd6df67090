"""Are a first divergence's error and floor those that its ratio is of?"""

from __future__ import annotations

from typing import Any

import pytest

from rlprobe.judge import decisive


def row(**given: Any) -> Any:
    return {
        "slot": "output", "error": 0.01, "floor": 0.1, "excess": 0.1, "dense_error": None,
        "noise_dense": None, "norm_benchmark": 2.0, "norm_diff": -0.004, **given,
    }  # fmt: skip


CHANGE = {"slot": "change", "dense_error": 0.003, "noise_dense": 1e-3}


@pytest.mark.parametrize(
    ("given", "name", "error"),
    [
        ({"error": 0.4, "excess": 4.0}, "elements", 0.4),
        ({"excess": 5.0}, "norm", 0.002),
        (CHANGE | {"excess": 3.0}, "dense", 0.003),
        (CHANGE | {"excess": 5.0}, "norm", 0.002),
    ],
)
def test_the_two_numbers_of_a_ratio(given: dict[str, Any], name: str, error: float) -> None:
    judged = row(**given)
    found = decisive.of(judged)
    assert found.name == name and found.error == pytest.approx(error)
    assert found.floor is not None and error / found.floor == pytest.approx(judged["excess"])


def test_what_has_no_finite_ratio_is_told_as_it_is() -> None:
    found = decisive.of(row(excess=float("inf"), floor=0.0))
    assert (found.name, found.error, found.floor) == ("elements", 0.01, 0.0)
    assert decisive.of(row(error=None, excess=None)).error is None


@pytest.mark.parametrize(
    ("kind", "uncertainty", "about"),
    [("sketch", 0.09, True), ("sketch", 0.0, False), ("tensor", None, False), (None, None, False)],
)
def test_an_error_of_a_sketch_is_told_as_about(
    kind: str | None, uncertainty: float | None, about: bool
) -> None:
    found = decisive.of(row(error=0.4, excess=4.0, error_kind=kind, error_uncertainty=uncertainty))
    assert found.about is about
