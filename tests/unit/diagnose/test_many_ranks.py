"""A stage of many ranks: what is asked of all of them at once is what a table of all would say."""

from __future__ import annotations

import polars as pl
import pytest

from rlprobe.judge import execution
from rlprobe.judge.excuses import positions
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import judge
from rlprobe.judge.row import columns_where
from rlprobe.judge.stage import Process, Stage
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device


@pytest.mark.parametrize(
    "which",
    [
        pl.col("judged") & ~pl.col("beyond"),
        pl.col("slot") == "no such slot",
        pl.col("call") == pl.col("call").min(),
        (pl.col("excess") > pl.col("excess").mean()).fill_null(False),
    ],
    ids=["most", "none", "of all rows", "of all numbers"],
)
def test_columns_of_some_rows_are_those_of_the_whole_table(align: Align, which: pl.Expr) -> None:
    found = align(Device(faults={"output model.layers.1.mlp.down_proj": lambda y: 1.01 * y}))
    for finding in judge(Results.open(found.results), 0).findings.values():
        whole = finding.stage.rows.filter(which)
        for columns in (["name"], ["floor", "rank", "shape_target"]):
            assert columns_where(finding.stage.rows, which, *columns).equals(whole.select(columns))


def activations(rank: int, other: int, alike: int) -> pl.DataFrame:
    """Outputs of a rank, some with other leading dimensions on the target."""
    shapes = [[4, 8]] * other + [[2, 8]] * alike
    return pl.DataFrame({
        "rank": rank, "phase": execution.FORWARD, "slot": "output",
        "status": ["shape"] * other + ["matched"] * alike,
        "shape_benchmark": [[2, 8]] * (other + alike), "shape_target": shapes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "split"),
    [
        ([(9, 1), (0, 10), (0, 10), (0, 10)], False),
        ([(9, 1), (9, 1), (0, 10), (0, 10)], True),
        ([(0, 1)] * 3 + [(2, 1)], True),
        ([(0, 0)] * 4, False),
    ],
    ids=["one of four", "two of four", "a third", "nothing"],
)
def test_a_split_is_one_of_all_ranks_together(ranks: list[tuple[int, int]], split: bool) -> None:
    parts = [activations(rank, *counts) for rank, counts in enumerate(ranks)]
    parts = [part.cast({"shape_benchmark": pl.List(pl.Int64), "shape_target": pl.List(pl.Int64)})
             for part in parts]  # fmt: skip
    assert positions._split(parts) is split
    assert positions._split([pl.concat(parts)]) is split


def test_rows_are_the_ranks_one_after_the_other() -> None:
    parts = [activations(rank, 1, 2) for rank in (0, 1)]
    stage = Stage("actor_update", 0, [Process(n, part, []) for n, part in enumerate(parts)])
    assert stage.rows.equals(pl.concat(parts))
    assert columns_where(stage.rows, pl.col("status") == "shape", "rank").get_column(
        "rank"
    ).to_list() == [
        0,
        1,
    ]
