"""Can one token of very many hide among a stage's results, below a floor that is of all of them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.dumps.key_data import KeyData
from rlprobe.judge import decisive, given, keydata, outcomes, stage_results
from rlprobe.judge.keydata import Row
from rlprobe.judge.stage import Process, Stage
from tests.unit.diagnose.stand_ins import found

Array = np.ndarray
#: Of a stage in 16 bits: what its deepest record may differ by.
FLOOR = 0.03
SAMPLES, TOKENS = 64, 512


def log_probs(chance: np.random.Generator) -> Array:
    """Most tokens are certain, a few are not: as of a trained policy."""
    return -(chance.exponential(1.0, (SAMPLES, TOKENS)) ** 3).astype(np.float32)


def rounded(values: Array, chance: np.random.Generator, by: float) -> Array:
    """Round-off of a deviation that grows with the value, as noisy as may be."""
    scale = np.maximum(np.abs(values), np.sqrt(np.mean(values**2)))
    return (values + by * scale * chance.standard_normal(values.shape)).astype(np.float32)


def rows(values: Array) -> list[Row]:
    return [Row(f"s{n}", row, 0, 0, n, 0) for n, row in enumerate(values)]


def outcome(benchmark: Array, target: Array, by_value: bool = True) -> outcomes.Outcome:
    difference = keydata.compare(rows(benchmark), rows(target), "old_log_probs", 0)
    one = stage_results._outcome(difference, FLOOR, by_value)
    assert one is not None
    return one


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", [(0, 0), (17, 300), (SAMPLES - 1, TOKENS - 1)])
def test_one_wrong_token_of_very_many_is_beyond(seed: int, place: tuple[int, int]) -> None:
    chance = np.random.default_rng(seed)
    mine = log_probs(chance)
    other = rounded(mine, chance, FLOOR / 40)
    assert outcome(mine, other).excess <= 1
    other[place] -= 0.5 * np.sqrt(np.mean(mine**2)) + 0.5 * abs(mine[place])
    one = outcome(mine, other)
    assert one.excess > 1 and one.measure == outcomes.SINGLE_VALUE
    assert outcome(mine, other, by_value=False).excess <= 1, "all together it is nothing"
    difference = keydata.compare(rows(mine), rows(other), "old_log_probs", 0)
    assert (difference.peak_sample, difference.peak_position) == (f"s{place[0]}", place[1])


def test_a_token_is_counted_from_the_response_where_the_row_has_the_prompt_too() -> None:
    mine = np.ones((2, 8), np.float32)
    other = mine.copy()
    other[1, 6] = 3.0
    for begin, position in ((0, 6), (4, 2), (7, None), (None, None)):
        sides = [[Row(f"s{n}", row, 0, 0, n, begin) for n, row in enumerate(side)]
                 for side in (mine, other)]  # fmt: skip
        found = keydata.compare(sides[0], sides[1], "values", 0)
        assert (found.peak_sample, found.peak_position) == ("s1", position)


def test_no_token_of_as_noisy_a_device_as_the_floor_allows_is_beyond() -> None:
    """The tail's bound holds for the largest of all, and is not so wide that nothing would."""
    largest = []
    for seed in range(60):
        chance = np.random.default_rng(seed)
        mine = log_probs(chance)
        difference = keydata.compare(
            rows(mine), rows(rounded(mine, chance, FLOOR)), "old_log_probs", 0
        )
        largest.append(difference.peak / (outcomes.tail(difference.count) * FLOOR))
    assert 0.4 < max(largest) < 1


@pytest.mark.parametrize("count", [1, 100, 100_000])
def test_the_tail_is_that_of_the_largest_of_so_many(count: int) -> None:
    chance = 2 * count * np.exp(-(outcomes.tail(count) ** 2) / 2)
    assert chance == pytest.approx(outcomes.FALSE_ALARM)


def test_a_number_near_zero_is_held_against_the_size_of_the_others() -> None:
    mine = np.ones((4, 100), np.float32)
    mine[2, 50] = 1e-6
    other = mine.copy()
    other[2, 50] = 3e-3  # three thousand times itself, and a 300th of the others
    assert outcome(mine, other).excess < 1
    other[2, 50] = 0.9
    assert outcome(mine, other).excess > 1


def test_positions_that_hold_nothing_do_not_make_the_others_small() -> None:
    """Zeros of a prompt, which no stage computes, are no values that say how large values are."""
    chance = np.random.default_rng(1)
    mine = log_probs(chance)
    padded = np.concatenate([np.zeros((SAMPLES, 20 * TOKENS), np.float32), mine], axis=1)
    own, wide = (keydata.compare(rows(v), rows(1.001 * v), "values", 0) for v in (mine, padded))
    assert own.peak == pytest.approx(wide.peak)


def test_where_experts_were_chosen_otherwise_within_round_off_a_token_may_be_anything() -> None:
    chance = np.random.default_rng(2)
    mine = log_probs(chance)
    other = mine.copy()
    other[3, 3] -= 20.0
    difference = keydata.compare(rows(mine), rows(other), "old_log_probs", 0)
    table = pl.DataFrame(
        {"name": ["m"], "judged": [True], "error": [0.0], "floor": [FLOOR], "phase": [0],
         "dtype_benchmark": ["torch.bfloat16"], "dtype_target": ["torch.bfloat16"],
         "shape_benchmark": [[2]], "slot": ["output"], "excess": [0.0], "beyond": [False],
         "excused_by": [None], "unjudged_because": [None]},
    )  # fmt: skip
    for ties, beyond in ((0, True), (2, False)):
        stage = Stage(stages.LOG_PROB, 0, [Process(0, table, [], near_ties=ties)])
        (one,) = stage_results.results_of(stage, {"old_log_probs": difference})
        assert (one.excess > 1) == beyond


@pytest.mark.parametrize(
    ("name", "source", "change", "beyond"),
    [
        ("given_old_log_probs", "old_log_probs", lambda v: v, False),
        ("given_old_log_probs", "old_log_probs", lambda v: np.roll(v, 0) * 1.0005, False),
        ("given_values", "values", lambda v: np.where(np.arange(v.size) == 5, v + 3, v), True),
        ("given_old_log_probs", "old_log_probs",
         lambda v: np.where(np.arange(v.size) == np.argmin(abs(v + 27)), 0.0, v), True),
        ("advantages", "values", lambda v: np.where(np.arange(v.size) == 7, v + 90, v), True),
    ],
)  # fmt: skip
def test_what_an_update_is_given_is_held_against_its_source_token_by_token(
    name: str, source: str, change: Callable[[Array], Array], beyond: bool
) -> None:
    chance = np.random.default_rng(3)
    mine = log_probs(chance)
    other = rounded(mine, chance, 1e-3)
    handed = change(other.reshape(-1)).reshape(mine.shape).astype(np.float32)
    differences = {
        source: keydata.compare(rows(mine), rows(other), source, 0),
        name: keydata.compare(rows(mine), rows(handed), name, 0),
    }
    stage = keydata.stage_of(name)
    (one,) = given.outcomes(differences, stage)
    assert (one.excess > 1) == beyond
    wrong = given.wrong(differences, stage)
    assert bool(wrong) == beyond
    if beyond:
        assert "differs by" in wrong[0].said and "of its size" in wrong[0].said


def test_what_is_said_of_one_value_is_said_as_such() -> None:
    row: Any = {"name": "old_log_probs", "error": 0.5, "floor": 0.1, "excess": 5.0,
                "error_kind": outcomes.SINGLE_VALUE}  # fmt: skip
    assert decisive.of(row).name == outcomes.SINGLE_VALUE
    assert decisive.of(row | {"error_kind": None}).name == decisive.ELEMENTS


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ((np.int64, np.float64), "input_ids (whole numbers against float64)"),
        ((np.float32, np.float32), ""),
        ((np.int64, np.int32), ""),  # every id is there in both
        ((np.bool_, np.int64), "attention_mask (truth values against whole numbers)"),
        ((np.bool_, np.float32), "attention_mask (truth values against float32)"),
    ],
)
def test_ids_and_masks_of_another_numeric_format_are_said(
    kinds: tuple[Any, Any], said: str, tmp_path: Any
) -> None:
    name = said.partition(" ")[0] or "input_ids"
    sides = []
    for side, kind in zip(("b", "t"), kinds, strict=True):
        place = tmp_path / side / name / "step0" / "rank0" / "micro_step0"
        place.mkdir(parents=True)
        np.save(place / f"{name}.npy", np.array([[1, 0, 1, 1]]).astype(kind))
        sides.append(KeyData(tmp_path / side).rows(name, 0))
    named = [[Row("s", row.values, 0, 0, 0, None, row.format) for row in side] for side in sides]
    difference = keydata.compare(named[0], named[1], name, 0)
    text = found(key_data={name: difference})
    assert said in text and bool(text) == bool(said)
