"""Are rows that only stand elsewhere inside a block no difference, and others one?"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.judge import execution
from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import recomposed
from rlprobe.judge.execution import Call

FLOOR = 1e-5
EXPERTS = "layers.0.mlp.experts"
INSIDE = f"{EXPERTS}.act_fn"


def record(module: str, slot: str, **given: Any) -> dict[str, Any]:
    """A record of one call; with ``error`` beyond the floor its rows stand in another order."""
    error = given.get("error", 0.1 * FLOOR)
    shape = [188, 64]
    size = error or 0.0
    return {
        "call_id": {EXPERTS: 0, INSIDE: 1, "norm": 2, "layers.0.mlp": 3}[module],
        "module": module, "slot": slot, "micro_batch": 0, "phase": execution.FORWARD,
        "status": "matched", "reason": None, "judged": True, "shape_benchmark": shape,
        "shape_target": shape, "error": error, "floor": FLOOR, "excess": size / FLOOR,
        "beyond": size > FLOOR, "norm_benchmark": 100.0, "norm_diff": 1e-5,
        "max_benchmark": 5.0, "min_benchmark": -5.0, "max_diff": 0.0, "min_diff": 0.0,
        "mean_diff": 0.0, "excused_by": None, "unjudged_because": None, **given,
    }  # fmt: skip


def calls() -> list[Call]:
    """As listed; the gradients of a block may be complete before those inside it, so unnested."""
    return [
        Call(module, "Module", 0, "forward", 0, 0, 0)
        for module in (EXPERTS, INSIDE, "norm", "layers.0.mlp")
    ]


def allowed(rows: list[dict[str, Any]], made: list[Call]) -> tuple[pl.DataFrame, list[str]]:
    """The rows after what blocks excuse, and these blocks."""
    kinds = {"excused_by": pl.String, "unjudged_because": pl.String}
    table = pl.DataFrame(rows, infer_schema_length=None, schema_overrides=kinds)
    excuses, blocks = recomposed.excuses(table, made)
    return reduce(table, excuses), blocks


def beyond(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Modules of what is judged beyond its floor; blocks with other rows inside."""
    judged, blocks = allowed(rows, calls())
    left = judged.filter(pl.col("judged") & pl.col("beyond"))
    return left.get_column("module").to_list(), blocks


def around(*inside: dict[str, Any], **result: Any) -> list[dict[str, Any]]:
    return [record(EXPERTS, "input"), *inside, record(EXPERTS, "output", **result)]


@pytest.mark.parametrize("phase", [execution.FORWARD, execution.BACKWARD])
def test_rows_in_another_order_inside_a_block_that_agrees(phase: int) -> None:
    rows = around(record(INSIDE, "input", error=1.4), record(INSIDE, "output", error=1.2))
    assert beyond([row | {"phase": phase} for row in rows]) == ([], [EXPERTS])


def test_another_number_of_rows_inside_a_block_that_agrees() -> None:
    fewer: dict[str, Any] = {"status": "shape", "shape_target": [94, 64], "norm_diff": -30.0}
    inside = record(INSIDE, "output", error=0.3, **fewer)
    assert beyond(around(inside)) == ([], [EXPERTS])


@pytest.mark.parametrize(
    "result",
    [{"error": 2 * FLOOR}, {"error": None}, {"phase": execution.BACKWARD}],
)
def test_a_block_that_does_not_agree_excuses_nothing(result: dict[str, Any]) -> None:
    """Beyond its floor, not measured, or not recorded in this direction."""
    found, blocks = beyond(around(record(INSIDE, "output", error=1.2), **result))
    assert INSIDE in found and blocks == []


@pytest.mark.parametrize(
    "other",
    [
        {"error": 0.05},  # no other order: most elements agree
        {"error": 1.2, "norm_diff": 0.1},  # another norm
        {"error": 1.2, "max_diff": 0.1},
        {"error": 0.3, "status": "shape", "shape_target": [188, 32]},  # another width
        {"error": 1.2, "norm_benchmark": 1e-3, "norm_diff": 0.0},  # too small to be seen outside
    ],
)
def test_other_numbers_inside_are_a_difference(other: dict[str, Any]) -> None:
    assert beyond(around(record(INSIDE, "output", **other))) == ([INSIDE], [])


WIDE = {"floor": 0.68, "excess": 1.03, "beyond": True}


@pytest.mark.parametrize(
    "other",
    [
        {"error": 0.7, "norm_diff": 30.0},
        {"error": 0.7, "max_diff": 2.0},
        {"error": 0.7, "mean_diff": 0.5},
    ],
)
def test_a_floor_as_wide_as_elements_differ_makes_no_numbers_the_same(
    other: dict[str, Any],
) -> None:
    inside = record(INSIDE, "output", **{**WIDE, **other})
    assert beyond(around(inside)) == ([INSIDE], [])


def test_rows_in_another_order_are_still_told_where_the_floor_is_wide() -> None:
    inside = record(INSIDE, "output", **{**WIDE, "error": 0.7, "norm_diff": 0.5, "max_diff": 0.02})
    assert beyond(around(inside)) == ([], [EXPERTS])


def test_only_what_stands_otherwise_is_left_out() -> None:
    """Neither what is not finite inside nor what follows the block."""
    lopsided = {"status": "nonfinite", "reason": "target", "beyond": True, "error": None}
    rows = around(record(INSIDE, "output", error=1.2), record(INSIDE, "output", **lopsided))
    rows.append(record("norm", "output", error=1e-3))
    assert beyond(rows) == ([INSIDE, "norm"], [EXPERTS])


def test_a_module_without_recorded_surroundings_is_judged() -> None:
    assert beyond([record("norm", "output", error=1.2)]) == (["norm"], [])


def test_functional_calls_belong_to_the_module_that_made_them() -> None:
    nested = calls()
    nested[1] = Call(None, "silu", 0, "forward", 0, 0, 0, parent=0)
    rows = around(record(INSIDE, "output", error=1.2) | {"module": None})
    judged, blocks = allowed(rows, nested)
    assert blocks == [EXPERTS]
    assert not judged.filter(pl.col("call_id") == 1).get_column("judged").any()
