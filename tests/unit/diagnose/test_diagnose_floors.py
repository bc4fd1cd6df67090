"""Controls: what a repeat and a run in high precision say about the floor."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.judge.excuse import begin
from rlprobe.judge.excuses.padding_only import is_confined
from rlprobe.judge.floors import with_floor, with_floors
from rlprobe.judge.outcomes import Outcome


def table(**columns: list[Any]) -> pl.DataFrame:
    """Rows with noise 1e-6 and an error of 5e-6 each, unless said otherwise."""
    count = len(next(iter(columns.values())))
    rows: dict[str, Any] = {
        "step": [0] * count, "rank": [0] * count, "name": [f"r{i}" for i in range(count)],
        "direction": ["forward"] * count, "slot": ["output"] * count, "status": ["matched"] * count,
        "reason": [None] * count, "error": [5e-6] * count, "error_kind": ["sketch"] * count,
        "error_uncertainty": [0.09] * count, "noise": [1e-6] * count, "noise_dense": [None] * count,
        "dense_error": [None] * count,
        "dtype_benchmark": ["torch.float32"] * count, "dtype_target": ["torch.float32"] * count,
    }  # fmt: skip
    rows |= columns
    kinds = {"noise_dense": pl.Float64, "dense_error": pl.Float64, "reason": pl.String}
    frame = pl.DataFrame(rows, schema_overrides=kinds)
    return frame.with_columns(ratio=pl.col("error") / pl.col("noise"))


def held(
    rows: pl.DataFrame,
    repeats: dict[str, pl.DataFrame] | None = None,
    precise: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """The rows against their floors, before any excuse."""
    floored = with_floor(rows, repeats or {}, precise)
    return begin(floored.with_columns(before_update=pl.lit(True)))


def test_without_a_control_the_bound_judges() -> None:
    found = held(table(error=[5e-6, 5e-7]), {})
    assert found.get_column("beyond").to_list() == [True, False]
    assert found.get_column("floor").to_list() == [1e-6, 1e-6]


def test_a_device_that_does_not_repeat_itself_raises_the_floor() -> None:
    again = table(error=[4e-6, 0.0])
    found = held(table(error=[5e-6, 5e-6]), {"repeat": again})
    assert not found.get_column("beyond").any()
    exact = held(table(error=[5e-6, 5e-6]), {"repeat": table(error=[0.0, 0.0])})
    assert exact.get_column("beyond").all()


def test_ranks_in_parts_have_the_floors_that_they_have_together() -> None:
    """How far repeats exceed the bound is of all ranks, wherever their rows stand."""
    errors = [[5e-6, 4e-6, 2e-6], [9e-6, 1e-6, 3e-6], [1e-7, 8e-6, 2e-5]]
    ranks = [
        table(error=own, rank=[number] * 3, slot=["output", "input", "output"])
        for number, own in enumerate(errors)
    ]
    again = {
        "repeat": table(
            error=[3e-6, 0.0, 7e-6, 2e-6] * 2 + [6e-6],
            rank=[0] * 3 + [1] * 3 + [2] * 3,
            name=["r0", "r1", "r2"] * 3,
        )
    }
    precise = table(error=[1e-6] * 6, rank=[1] * 3 + [2] * 3, name=["r0", "r1", "r2"] * 2)
    whole = with_floor(pl.concat(ranks), again, precise)
    assert whole.get_column("floor").n_unique() == 2, "one scale of each slot"
    assert pl.concat(with_floors(ranks, again, precise)).equals(whole)
    alone = pl.concat(with_floor(one, again, precise) for one in ranks)
    assert not alone.equals(whole), "a rank alone knows less of its device"


def test_a_repeat_whose_sketch_saw_nothing_raises_nothing() -> None:
    again = table(error=[2e-7], error_uncertainty=[1.0])
    found = held(table(error=[5e-6]), {"repeat": again})
    assert found.get_column("repeat_error").to_list() == [0.0]
    assert found.get_column("floor").to_list() == [1e-6]


def test_no_difference_seen_is_not_near_the_floor() -> None:
    found = held(table(error=[2e-7], error_uncertainty=[1.0], noise=[3e-7]), {})
    assert found.get_column("excess").to_list() == [0.0]


def test_a_target_no_worse_than_the_benchmark_is_not_beyond() -> None:
    # In bf16 both sides are 1e-2 away from fp32; the target a little more.
    precise = table(error=[1.66e-3, 1.66e-3])
    rows = table(error=[2.9e-3, 2e-2], noise=[1e-5, 1e-5])
    found = held(rows, {}, precise)
    assert found.get_column("R").to_list() == pytest.approx([1.43, 12.0], rel=0.01)
    assert found.get_column("beyond").to_list() == [False, True]


def test_a_benchmark_that_is_the_worse_one_is_not_blamed_on_the_target() -> None:
    found = held(table(error=[1e-2], noise=[1e-5]), {}, table(error=[1e-2]))
    assert found.get_column("R").to_list() == [0.0]
    assert not found.get_column("beyond").any()


def test_not_finite_on_one_side_is_beyond_anything() -> None:
    rows = table(error=[None, None], status=["nonfinite"] * 2, reason=["target", "both"])
    assert held(rows, {}).get_column("beyond").to_list() == [True, False]


def test_a_mask_of_booleans_is_not_compared_with_one_of_numbers() -> None:
    rows = table(error=[1.0, 1.0], dtype_target=["torch.bool", "torch.bfloat16"])
    assert held(rows, {}).get_column("beyond").to_list() == [False, True]


def hidden(error: float, **more: Any) -> pl.DataFrame:
    return pl.DataFrame(
        {"judged": [True], "beyond": [True], "phase": [0], "status": ["matched"],
         "dtype_benchmark": ["torch.float32"], "error": [error]} | more
    )  # fmt: skip


AGREE = [Outcome("old_log_probs", 3e-7, 8e-6)]


def test_padding_that_no_result_depends_on_is_told_from_a_fault() -> None:
    assert is_confined(hidden(0.69), AGREE)
    assert not is_confined(hidden(2e-5), AGREE)  # it may yet be too small to show
    assert not is_confined(hidden(0.69), [Outcome("old_log_probs", 1e-4, 8e-6)])
    assert not is_confined(hidden(0.69), [])
    assert not is_confined(hidden(0.69, phase=[2]), AGREE)
    assert not is_confined(hidden(0.69, dtype_benchmark=["torch.int64"]), AGREE)
