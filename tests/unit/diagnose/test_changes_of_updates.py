"""What is said of changes: of the first update that differs, in digits that are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import polars as pl
import pytest

from rlprobe.diagnose.cause import gradients
from rlprobe.diagnose.cause.around import Scene
from rlprobe.diagnose.cause.differences import Changes
from rlprobe.diagnose.cause.hypotheses.updated import Optimizer
from rlprobe.diagnose.cause.measure import about
from rlprobe.judge import execution

FLOOR = 1e-6


def changes(ratios: dict[int, list[float]]) -> Scene:
    """Norms of changes by update: what the target's are of the benchmark's."""
    rows = pl.DataFrame(
        [
            {
                "judged": True, "phase": execution.CHANGES, "update": update,
                "norm_benchmark": 2.0, "norm_target": 2.0 * ratio, "error": abs(ratio - 1),
                "beyond": abs(ratio - 1) > FLOOR, "floor": FLOOR, "error_kind": "norm",
                "dtype_benchmark": "float32", "shape_benchmark": [64],
            }
            for update, own in ratios.items()
            for ratio in own
        ]
    )  # fmt: skip
    return cast(Scene, SimpleNamespace(finding=SimpleNamespace(stage=SimpleNamespace(rows=rows))))


def said(ratios: dict[int, list[float]]) -> str:
    [found] = gradients.optimizer(changes(ratios)).differences
    assert isinstance(found, Changes)
    fit = Optimizer().fit(found)
    assert fit is not None
    return "; ".join(fit.said)


def test_a_later_update_is_not_counted_with_the_first() -> None:
    """It inherits what the first changed otherwise."""
    assert said({0: [1.02] * 21, 1: [1.4] * 21}).startswith(
        "21 of 21 parameters changed otherwise in update 0"
    )


def test_the_update_that_differs_is_named() -> None:
    text = said({0: [1.0] * 21, 1: [1.0] * 6 + [0.5] * 15})
    assert text.startswith("15 of 21 parameters changed otherwise in update 1")


def test_where_there_is_one_update_it_has_no_number() -> None:
    text = said({0: [1.0, 1.02, 1.02]})
    assert text.startswith("2 of 3 parameters changed otherwise") and "in update" not in text


@pytest.mark.parametrize(
    ("factor", "text"),
    [(3.15172, "3.2"), (1.02, "1.020"), (0.5004, "0.50"), (1.00021, "1.00021"), (31.7, "32")],
)
def test_a_factor_has_the_digits_that_are_known(factor: float, text: str) -> None:
    assert about(factor, 0.05) == text
