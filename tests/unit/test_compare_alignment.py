"""Calls that one side makes more often: does every call meet its own, and do pairs never cross?"""

from __future__ import annotations

import itertools
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.compare.match.alignment import Calls, align, scores
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import Result, compared_data


def leaf(top: float, shape: tuple[int, ...] = (4, 8)) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), shape)


def functions(*made: tuple[str, float] | tuple[str, float, tuple[int, ...]]) -> dict[str, Any]:
    """Functional calls (name, value, shape) as msprobe numbers them."""
    data: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for name, top, *shape in made:
        number = numbers.get(name, 0)
        numbers[name] = number + 1
        one = leaf(top, *shape)
        data[f"Functional.{name}.{number}.forward"] = call([one], [one])
    return data


def pairs(result: Result) -> set[tuple[str, str]]:
    """Names of both sides of every matched output, without what is the same of all."""
    found = result.records.filter(
        pl.col("name_benchmark").is_not_null() & pl.col("name_target").is_not_null()
    ).filter(slot="output")
    return {
        tuple(name.removeprefix("Functional.").removesuffix(".forward.output.0") for name in row)
        for row in found.select("name_benchmark", "name_target").rows()
    }


MODEL = [("embedding", 1.0), *((op, 10.0 * n + k) for n in range(1, 4)
         for k, op in enumerate(("norm", "linear", "silu", "linear")))]  # fmt: skip


@pytest.mark.parametrize("place", [0, 1, 5, 8, len(MODEL)])
def test_an_extra_call_stays_alone_wherever_it_is(tmp_path: Path, place: int) -> None:
    """A check before the model, between layers, after it: every other call meets its own."""
    target = functions(*MODEL[:place], ("linear", 777.0), *MODEL[place:])
    result = compared_data(tmp_path, functions(*MODEL), target)
    extra = sum(op == "linear" for op, _ in MODEL[:place])
    assert result.summary["unmatched"]["target"] == [
        f"Functional.linear.{extra}.forward.{slot}.0" for slot in ("input", "output")
    ]
    assert result.summary["unmatched"]["benchmark"] == []
    assert result.records["error"].max() == 0
    assert "ambiguous_call" not in result.summary["rules"]


def test_calls_meet_their_own_where_later_values_differ(tmp_path: Path) -> None:
    """A weight 1 % off and round-off everywhere: still the nearest, in order."""
    benchmark = functions(*MODEL)
    noisy = [(op, value * (1.01 if n > 6 else 1 + 1e-6)) for n, (op, value) in enumerate(MODEL)]
    result = compared_data(tmp_path, benchmark, functions(("linear", 1.0), *noisy))
    assert pairs(result) >= {(f"linear.{n}", f"linear.{n + 1}") for n in range(6)}
    assert result.records["error"].max() == pytest.approx(0.01, rel=0.05)


def test_as_many_calls_that_are_shifted_are_not_paired_by_number(tmp_path: Path) -> None:
    """A check before the model on one side, another after it on the other: as many calls."""
    result = compared_data(
        tmp_path, functions(*MODEL, ("linear", 555.0)), functions(("linear", 777.0), *MODEL)
    )
    assert pairs(result) >= {(f"linear.{n}", f"linear.{n + 1}") for n in range(6)}
    assert result.records["error"].max() == 0


@pytest.mark.parametrize(("gone", "extra"), [(0, 20), (5, 12), (20, 3), (19, 0)])
@pytest.mark.parametrize("more", [1, 2])
def test_calls_of_one_function_that_are_shifted_are_not_paired_by_number(
    tmp_path: Path, gone: int, extra: int, more: int
) -> None:
    """One function, called as often in the same order of names: values alone say so."""
    whole = [("linear", 3.0 * n * n + 1) for n in range(24)]
    target = whole[:gone] + whole[gone + more :]
    target[extra:extra] = [("linear", 5000.0 + n) for n in range(more)]
    result = compared_data(tmp_path, functions(*whole), functions(*target), coverage=0.5)
    assert result.records["error"].max() == 0
    assert result.summary["counts"]["benchmark_only"] == 2 * more
    assert result.summary["counts"]["target_only"] == 2 * more


@pytest.mark.parametrize("changed", ["all", "one", "two changed places", "the tail"])
def test_calls_that_only_differ_are_paired_by_number(tmp_path: Path, changed: str) -> None:
    whole = [("linear", 3.0 * n * n + 1) for n in range(24)]
    values = [value for _, value in whole]
    if changed == "all":
        values = [value * 1.7 for value in values]
    elif changed == "one":
        values[7] = values[8]
    elif changed == "two changed places":
        values[7], values[8] = values[8], values[7]
    else:
        values[12:] = [value * 1.3 for value in values[12:]]
    target = [("linear", value) for value in values]
    result = compared_data(tmp_path, functions(*whole), functions(*target))
    assert result.summary["counts"]["matched"] == 48 and result.summary["rules"] == {}


def test_a_missing_call_and_an_extra_one_of_another_shape(tmp_path: Path) -> None:
    benchmark = functions(*MODEL, ("linear", 3.0, (6, 6)))
    without: list[Any] = [*MODEL[:4], *MODEL[5:], ("linear", 3.0, (6, 6)), ("linear", 4.0, (7, 7))]
    result = compared_data(tmp_path, benchmark, functions(*without), coverage=0.5)
    assert result.summary["unmatched"]["benchmark"][0] == "Functional.linear.1.forward.input.0"
    assert result.summary["unmatched"]["target"][0] == "Functional.linear.6.forward.input.0"
    assert result.records["error"].max() == 0


def test_equal_calls_of_which_one_is_missing_are_said_to_be_ambiguous(tmp_path: Path) -> None:
    same = [("norm", 1.0), *[("linear", 2.0)] * 3, ("silu", 3.0)]
    result = compared_data(tmp_path, functions(*same), functions(*same[:2], *same[3:]))
    assert result.summary["rules"] == {"ambiguous_call": 4}
    assert result.summary["counts"]["benchmark_only"] == 2


def test_independent_calls_in_another_order_are_still_themselves(tmp_path: Path) -> None:
    benchmark = functions(("cos", 1.0), ("sin", 2.0), ("linear", 3.0), ("linear", 4.0))
    target = functions(
        ("linear", 9.0), ("sin", 2.0), ("cos", 1.0), ("linear", 3.0), ("linear", 4.0)
    )
    result = compared_data(tmp_path, benchmark, target)
    assert pairs(result) == {
        ("cos.0", "cos.0"), ("sin.0", "sin.0"), ("linear.0", "linear.1"), ("linear.1", "linear.2")
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "actor."])
def test_one_more_forward_of_the_whole_model_shifts_no_other(tmp_path: Path, prefix: str) -> None:
    """A warm-up: each module runs once more on one side, with another batch."""

    def model(*batches: float, before: str = "") -> dict[str, Any]:
        return {
            f"Module.{before}layers.{n}.Linear.forward.{number}": call(
                [leaf(top + n)], [leaf(top + n + 0.5)]
            )
            for number, top in enumerate(batches)
            for n in range(3)
        }

    result = compared_data(
        tmp_path, model(10.0, 30.0), model(900.0, 10.0, 30.0, before=prefix), coverage=0.5
    )
    assert result.summary["counts"]["target_only"] == 6
    assert result.summary["counts"]["benchmark_only"] == 0
    assert result.records["error"].max() == 0
    alone = result.records.filter(status="target_only")["name"]
    assert alone.str.contains(r"\.forward\.0\.").all()


def test_a_real_functional_dump_with_a_check_before_the_model(tmp_path: Path) -> None:
    """msprobe's L1; the target calls a linear before the model and has a weight 1 % larger."""
    packed = Path(__file__).parent / "cases/l1_extra_call.json.xz"
    both = json.loads(lzma.decompress(packed.read_bytes()))
    result = compared_data(tmp_path, both["a"], both["b"])
    linears = {pair for pair in pairs(result) if pair[0].startswith("linear")}
    assert linears >= {(f"linear.{n}", f"linear.{n + 1}") for n in range(5)}
    assert set(result.summary["unmatched"]["target"]) == {
        f"Functional.linear.0.forward.{slot}"
        for slot in ("input.0", "input.1", "input.2", "output.0")
    }
    # the weight is the first to differ, and nothing differs by more
    assert result.records["error"].max() == pytest.approx(0.01, rel=0.1)
    first = result.records.filter(pl.col("error") > 1e-4).row(0, named=True)
    assert first["name_benchmark"] == "Functional.linear.3.forward.input.1"


def best(left: Calls, right: Calls) -> float:
    """The best sum of scores over all ways to pair without crossing: every one is tried."""
    found = 0.0
    for size in range(1, min(len(left), len(right)) + 1):
        for rows in itertools.combinations(range(len(left)), size):
            for columns in itertools.combinations(range(len(right)), size):
                if all(left.keys[i] == right.keys[j] for i, j in zip(rows, columns, strict=True)):
                    found = max(found, total(left, right, rows, columns))
    return found


def total(left: Calls, right: Calls, rows: Any, columns: Any) -> float:
    return float(
        sum(scores(left, i, right, np.array([j]))[0] for i, j in zip(rows, columns, strict=True))
    )


def test_the_alignment_is_the_best_of_all() -> None:
    rng = random.Random(7)
    for _ in range(60):
        left, right = (
            Calls(
                np.array([rng.randrange(2) for _ in range(n)]),
                np.array([rng.randrange(2) for _ in range(n)], np.uint64),
                np.array([[rng.choice([1.0, 1.001, 5.0, np.nan, np.inf])] for _ in range(n)]),
            )
            for n in (rng.randrange(1, 6), rng.randrange(1, 6))
        )
        found = align(left, right)
        assert (np.diff(found.left) > 0).all() and (np.diff(found.right) > 0).all()
        assert (left.keys[found.left] == right.keys[found.right]).all()
        assert total(left, right, found.left, found.right) == pytest.approx(best(left, right))


def test_long_sequences_are_aligned_within_a_band() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(3000, 4))
    keys, signatures = rng.integers(0, 5, 3000), np.zeros(3000, np.uint64)
    left = Calls(keys, signatures, values)
    kept = np.sort(rng.permutation(3000)[:2900])
    right = Calls(keys[kept], signatures[kept], values[kept] * (1 + 1e-4))
    found = align(left, right)
    assert (kept[found.right] == found.left).mean() > 0.999
    assert len(found.left) == 2900


def numbered(*numbers: int, layers: int = 3) -> dict[str, Any]:
    """Each module called once per number, each time with another batch."""
    return {
        f"Module.layers.{n}.Linear.forward.{number}": call(
            [leaf(100.0 * at + n)], [leaf(100.0 * at + n + 0.5)]
        )
        for at, number in enumerate(numbers, 1)
        for n in range(layers)
    }


@pytest.mark.parametrize("numbers", [(1, 2), (5, 6), (0, 3), (2, 7)])
def test_modules_counted_from_another_number_meet_in_order(
    tmp_path: Path, numbers: tuple[int, int]
) -> None:
    """Dumping began after the first forward, or one in between was left out."""
    result = compared_data(tmp_path, numbered(0, 1), numbered(*numbers))
    assert result.records["error"].max() == 0
    assert result.summary["counts"]["matched"] == 12 and result.lack is None
