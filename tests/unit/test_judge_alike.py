"""What ranks have in common is held once, and is what it was."""

from __future__ import annotations

import math

import polars as pl

from rlprobe.judge.alike import Alike
from rlprobe.judge.execution import Call


def rank(number: int, first: str = "a") -> pl.DataFrame:
    return pl.DataFrame(
        {
            "rank": [number] * 3,
            "order": [4, 5, 6],
            "name": [f"{first}.forward.0.output.0", "b.forward.0.output.0", None],
            "shape": [[2, 3], None, []],
            "error": [number / 7, 0.0, 1.0],
            "R": pl.Series([None] * 3, dtype=pl.Float64),
        }
    )


def place(frame: pl.DataFrame, name: str) -> int:
    """Where a column's numbers lie in memory."""
    return frame.get_column(name).to_numpy(allow_copy=False).ctypes.data


def test_equal_columns_are_one_and_numbers_stay_each_ranks_own() -> None:
    alike = Alike()
    first, second = alike.rows(rank(0)), alike.rows(rank(1))
    assert second.equals(rank(1)) and first.equals(rank(0))
    assert second.columns == rank(1).columns
    assert place(first, "order") == place(second, "order")
    equal = Alike()
    frames = equal.rows(rank(0)), equal.rows(rank(0))
    assert place(frames[0], "error") != place(frames[1], "error")
    assert second.get_column("rank").to_list() == [1, 1, 1]


def test_what_is_not_equal_is_not_shared() -> None:
    alike = Alike()
    alike.rows(rank(0))
    other = rank(0, first="c")
    assert alike.rows(other).equals(other)
    shorter = rank(0).head(2)
    assert alike.rows(shorter).equals(shorter)
    cast = rank(0).with_columns(pl.col("rank").cast(pl.Int8))
    assert alike.rows(cast).schema == cast.schema


def test_a_sign_of_zero_is_kept() -> None:
    alike = Alike()
    alike.rows(pl.DataFrame({"error": [0.0]}))
    found = alike.rows(pl.DataFrame({"error": [-0.0]})).item()
    assert math.copysign(1.0, found) == -1.0


def test_calls_are_shared_where_they_are_equal() -> None:
    def calls(module: str) -> list[Call]:
        return [Call(module, None, 0, "forward", 0, 1, 0, children=[2])]

    alike = Alike()
    first = alike.calls(calls("a"))
    assert alike.calls(calls("a")) is first
    assert alike.calls(calls("b")) == calls("b")
