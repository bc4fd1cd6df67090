"""Is a gate's single number that came out near zero no difference, and a fault beside it one?"""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from rlprobe.judge import execution
from rlprobe.judge.excuse import reduce
from rlprobe.judge.excuses import few_numbers
from rlprobe.judge.reasons import FEW_NUMBERS

FLOOR = 3e-5


def judged(
    norms: list[float], errors: list[float], shape: tuple[int, ...] = (1, 1), **changes: Any
) -> pl.DataFrame:
    """Calls of one gate in decoding: its numbers and their relative differences."""
    count = len(norms)
    rows = pl.DataFrame(
        {
            "module": ["model.layers.1.mlp.shared_expert_gate"] * count,
            "op": ["Linear"] * count,
            "slot": ["output"] * count,
            "index": ["0"] * count,
            "phase": [execution.FORWARD] * count,
            "status": ["matched"] * count,
            "reason": pl.Series([None] * count, dtype=pl.String),
            "shape_benchmark": [list(shape)] * count,
            "norm_benchmark": norms,
            "error": errors,
            "floor": [FLOOR] * count,
            "excess": [error / FLOOR for error in errors],
            "judged": [True] * count,
            "beyond": [error > FLOOR for error in errors],
            "excused_by": pl.Series([None] * count, dtype=pl.String),
            "unjudged_because": pl.Series([None] * count, dtype=pl.String),
        }
    ).with_columns(**{name: pl.lit(value) for name, value in changes.items()})
    return reduce(rows, few_numbers.excuses(rows))


def test_the_same_round_off_of_a_smaller_number_is_excused() -> None:
    """1.6e-6 in absolute terms, of numbers of about one half."""
    found = judged([0.5, 0.6, 0.4, 0.016], [2e-6, 3e-6, 2e-6, 1e-4])
    assert found["beyond"].to_list() == [False] * 4
    assert found["excused_by"].to_list() == [None, None, None, FEW_NUMBERS]
    assert found["floor"][3] == pytest.approx(FLOOR * 0.4387 / 0.016, rel=1e-3)


@pytest.mark.parametrize(
    ("norms", "errors"),
    [
        ([0.5, 0.6, 0.4, 0.016], [2e-6, 3e-6, 2e-6, 1e-2]),  # too far for any round-off
        ([0.5, 0.6, 0.4, 0.5], [2e-6, 3e-6, 2e-6, 1e-4]),  # of a number that is not small
        ([0.016, 0.016, 0.017, 0.016], [2e-6, 3e-6, 2e-6, 1e-4]),  # they are all so small
    ],
)
def test_a_difference_that_size_does_not_explain_stays_one(
    norms: list[float], errors: list[float]
) -> None:
    found = judged(norms, errors)
    assert found["beyond"].to_list() == [False, False, False, True]
    assert found["excused_by"].null_count() == 4


@pytest.mark.parametrize(
    "changes", [{"phase": execution.BACKWARD}, {"slot": "parameters"}, {"shape": (1, 64)}]
)
def test_where_many_numbers_make_the_norm_nothing_is_excused(changes: dict[str, Any]) -> None:
    found = judged([0.5, 0.6, 0.4, 0.016], [2e-6, 3e-6, 2e-6, 1e-4], **changes)
    assert found["beyond"].to_list() == [False, False, False, True]
