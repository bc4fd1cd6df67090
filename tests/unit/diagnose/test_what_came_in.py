"""What an update was given wrongly is another sample's, or other numbers, by what the rows show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlprobe.diagnose.cause import losses
from rlprobe.judge import given, keydata
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

Array = np.ndarray
ROWS = np.random.default_rng(4).standard_normal((8, 16))


def swapped(rows: Array) -> Array:
    return rows[[1, 0, 2, 3, 4, 5, 6, 7]]


def one_off(rows: Array) -> Array:
    found = rows.copy()
    found[3] += 1
    return found


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda rows: np.roll(rows, 1, 0), "row_order"),
        (lambda rows: rows[::-1], "row_order"),
        (swapped, "row_order"),
        (one_off, "data"),
        (lambda rows: 2 * rows, "data"),
        (lambda rows: rows + np.random.default_rng(5).standard_normal(rows.shape), "data"),
    ],
)
def test_rows_of_other_samples_are_told_from_other_numbers(
    change: Callable[[Array], Array], cause: str
) -> None:
    changed = change(ROWS)
    pairs = [(f"s{n}", b, t) for n, (b, t) in enumerate(zip(ROWS, changed, strict=True))]
    error = float(np.linalg.norm(changed - ROWS) / np.linalg.norm(ROWS))
    difference = keydata.Difference(
        "given_returns", 0, error, 1.0, 1.0, 8, 0, 0, sample="s0", pairs=pairs
    )
    found = losses._came_in(given.Wrong(difference, 1e-5))
    assert found.cause == cause, found
    assert "returns that the update was given differ" in found.said[0]


AS_IT_IS = Device(faults={"handed back": lambda rows: rows})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda rows: rows[[2, 1, 0, *range(3, len(rows))]], "row_order"),
        (lambda rows: rows[::-1], "row_order"),
        (lambda rows: np.maximum(rows, -1.5).astype(np.float32), "data"),
    ],
)
def test_what_a_stage_hands_back_is_its_own(
    align: Align, change: Callable[[Array], Array], cause: str
) -> None:
    target = Device(split=True, faults={"handed back": change})
    found = align(target, benchmark=AS_IT_IS, repeat=False).diagnose()
    assert found.first is not None and found.first.stage == "actor_compute_log_prob"
    assert found.first.module is None
    assert found.cause is not None and found.cause.class_ == cause, found.cause
    assert any("that the stage handed back differ" in said for said in found.cause.evidence)


@pytest.mark.slow
def test_what_is_handed_back_as_it_was_computed_agrees(align: Align) -> None:
    target = Device(split=True, faults=AS_IT_IS.faults)
    found = align(target, benchmark=AS_IT_IS).diagnose()
    assert found.verdict == "aligned", found.sentence


def test_a_mask_is_one_whatever_its_rows_lead_to() -> None:
    mask = keydata.Difference("given_response_mask", 0, 1.0, 1.0, 1.0, 8, 0, 0, sample="s0")
    assert losses._came_in(given.Wrong(mask, 0.0)).cause == "label_or_mask_shift"
