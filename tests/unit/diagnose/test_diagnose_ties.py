"""Are experts that fall the other way within round-off no fault, and others one?"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.judge import execution
from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import near_ties

TOKENS, EXPERTS, KEPT = 94, 4, 2
#: About ||indices||^2 of evenly spread choices.
SQUARE = TOKENS * KEPT * 3 * 7 / 6
#: Round-off of bf16 after some layers.
FLOOR = 0.17


def record(place: int, module: str, **given: Any) -> dict[str, Any]:
    floor = given.get("floor", FLOOR)
    error = given.get("error", 0.1 * floor)
    return {
        "sequence": place, "micro_batch": 0, "update": 0, "module": module, "call_id": 1,
        "slot": "output", "phase": execution.FORWARD, "status": "matched", "reason": None,
        "judged": True, "dtype_benchmark": "torch.bfloat16", "shape_benchmark": [TOKENS, EXPERTS],
        "norm_benchmark": None, "error": error, "floor": floor, "excess": error / floor,
        "beyond": error > floor, "excused_by": None, "unjudged_because": None, **given,
    }  # fmt: skip


def table(differ: float, floor: float = FLOOR, scores: float = 0.1) -> pl.DataFrame:
    """A router whose indices differ by ``differ`` (sum of squares), and what runs behind it."""
    behind = 0.08
    return pl.DataFrame(
        [
            record(0, "l.mlp.gate", floor=floor, error=scores * floor),
            record(1, "l.mlp.gate", dtype_benchmark="torch.int64", floor=3e-7,
                   shape_benchmark=[TOKENS, KEPT], error=(differ / SQUARE) ** 0.5),
            record(2, "l.mlp.experts.act_fn", call_id=2, floor=floor, error=1.0),
            record(3, "l.mlp", call_id=3, floor=floor, error=behind),
            record(4, "l.mlp", call_id=4, floor=floor, error=behind, phase=execution.BACKWARD),
            record(5, "norm", call_id=5, floor=floor, error=behind, micro_batch=1),
            record(6, "norm", call_id=6, floor=floor, error=behind, micro_batch=9,
                   phase=execution.GRADIENTS),
        ],
        schema_overrides={"excused_by": pl.String, "unjudged_because": pl.String},
    )  # fmt: skip


def allowed(rows: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """The rows after what near ties excuse, and how many choices fell the other way."""
    excuses, flips = near_ties.excuses(rows)
    return reduce(rows, excuses), flips


def first_beyond(rows: pl.DataFrame) -> list[str]:
    return rows.filter(pl.col("judged") & pl.col("beyond")).get_column("module").to_list()


def test_near_ties_widen_what_follows() -> None:
    rows, flips = allowed(table(4.0))
    assert flips == 4 and first_beyond(rows) == []
    floors = rows.get_column("floor").to_list()
    assert floors[3] == floors[4] == floors[6] == pytest.approx(2 * (8 / TOKENS) ** 0.5)
    assert floors[0] == floors[5] == FLOOR, "before it, and in another micro-batch, nothing changes"
    assert not rows.item(2, "judged"), "tokens stand in other places among experts"


def test_a_gradient_that_adds_up_has_the_ties_of_the_micro_batches_before() -> None:
    """Those of the same update, in gradients of parameters alone."""
    grad = {"slot": "grad", "phase": execution.BACKWARD, "error": 0.3}
    later = [
        record(7, "l.mlp.gate", call_id=7, micro_batch=1, **grad),
        record(8, "norm", call_id=8, micro_batch=2, **grad),
        record(9, "norm", call_id=9, micro_batch=2, **{**grad, "slot": "output"}),
        record(10, "norm", call_id=10, micro_batch=3, update=1, **grad),
    ]
    rows, flips = allowed(pl.concat([table(4.0), pl.DataFrame(later)], how="diagonal_relaxed"))
    assert flips == 4
    assert rows.filter(pl.col("beyond") & pl.col("judged"))["sequence"].to_list() == [9, 10]


@pytest.mark.parametrize(
    ("differ", "floor", "scores"),
    [
        (200.0, FLOOR, 0.1),  # more than chance explains
        (1.0, 6e-6, 0.1),  # fp32: not even one
        (4.0, FLOOR, 1.5),  # the scores differ themselves
    ],
)
def test_other_choices_are_a_fault(differ: float, floor: float, scores: float) -> None:
    rows, flips = allowed(table(differ, floor, scores))
    assert flips == 0 and first_beyond(rows)[0] == "l.mlp.gate"


def test_what_follows_may_not_differ_by_more_than_tokens_do() -> None:
    rows = table(1.0).with_columns(
        error=pl.when(pl.col("sequence") == 3).then(0.9).otherwise("error"),
        excess=pl.when(pl.col("sequence") == 3).then(0.9 / FLOOR).otherwise("excess"),
        beyond=pl.when(pl.col("sequence") == 3).then(True).otherwise("beyond"),
    )
    assert first_beyond(allowed(rows)[0]) == ["l.mlp"]


def test_what_is_not_finite_is_beyond_all_the_same() -> None:
    rows = table(1.0).with_columns(
        status=pl.when(pl.col("sequence") == 2).then(pl.lit("nonfinite")).otherwise("status"),
        reason=pl.when(pl.col("sequence") == 2).then(pl.lit("target")).otherwise("reason"),
    )
    assert first_beyond(allowed(rows)[0]) == ["l.mlp.experts.act_fn"]
