"""Numbers of a shorter format, whatever they are kept in: of results, under one precision."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlprobe.diagnose.cause.differences import Tokens
from rlprobe.diagnose.cause.hypotheses.rounding import OfTokens
from rlprobe.dumps.key_data import Row
from rlprobe.judge import digits, judge, keydata, stage_results
from rlprobe.judge.outcomes import OTHER_FORMAT
from rlprobe.judge.stage import Stage
from tests.unit.diagnose.test_later_updates import compared, judged
from tests.unit.noise_rows import BF16, FP16
from tests.unit.test_noise_bounds import rounded

NAME = "old_log_probs"
VALUES = -np.abs(np.random.default_rng(5).standard_normal((4, 24))).astype(np.float32) - 0.01


def bf16(x: Any) -> Any:
    return rounded(x, BF16)


def fp16(x: Any) -> Any:
    return rounded(x, FP16)


def as_is(x: Any) -> Any:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize(
    ("benchmark", "target", "format_"),
    [
        (as_is, bf16, "bfloat16"),
        (as_is, fp16, "float16"),
        (fp16, bf16, "bfloat16"),
        (bf16, bf16, None),
        (bf16, as_is, None),
        (as_is, lambda x: as_is(np.float32(x) * np.float32(1.001)), None),
        (as_is, lambda x: np.where(np.arange(24) < 23, bf16(x), as_is(x)), None),
        # whole numbers and few others are of any format
        (as_is, lambda x: np.round(as_is(x) * 2) / 2, None),
    ],
)
def test_a_shorter_format_is_one_that_all_numbers_are_of(
    benchmark: Any, target: Any, format_: str | None
) -> None:
    sides = [[make(row) for row in VALUES] for make in (benchmark, target)]
    assert digits.shorter(sides[0], sides[1]) == format_


def difference(make: Any) -> keydata.Difference:
    left, right = (
        [Row(f"s{n}", np.asarray(of(row), np.float32), 0, n) for n, row in enumerate(VALUES)]
        for of in (as_is, make)
    )
    return keydata.compare(left, right, NAME, 0)


@pytest.mark.parametrize(
    ("make", "one_precision", "found"),
    [(bf16, True, True), (fp16, True, True), (bf16, False, False), (as_is, True, False)],
)
def test_a_result_of_a_shorter_format_is_beyond_any_floor(
    make: Any, one_precision: bool, found: bool
) -> None:
    own = difference(make)
    stage = Stage("actor_compute_log_prob", 0, [wide()])
    (outcome,) = stage_results.results_of(stage, {NAME: own}, one_precision)
    assert outcome.error <= outcome.floor, "and within its floor by its size"
    assert (outcome.measure == OTHER_FORMAT) is found
    assert (outcome.excess == float("inf")) is found


@pytest.mark.parametrize(
    ("benchmark", "target", "alike"),
    [
        (("fsdp2",), ("fsdp2", "FSDP2"), True),
        (("megatron",), ("megatron",), True),
        ((None,), (None,), True),
        (("megatron",), ("fsdp2",), False),
        (("fsdp2",), ("fsdp2", "megatron"), False),
    ],
)
def test_another_back_end_may_hand_on_another_format(
    benchmark: tuple[str | None, ...], target: tuple[str | None, ...], alike: bool
) -> None:
    def run(backends: tuple[str | None, ...]) -> Any:
        layout = [SimpleNamespace(backend=backend) for backend in backends]
        return SimpleNamespace(manifest=SimpleNamespace(layout=layout))

    assert judge._alike([run(benchmark), run(target)]) is alike


def test_an_engines_results_are_judged_by_their_size() -> None:
    name = "forced_decode_log_probs"
    own = dataclasses.replace(difference(bf16), name=name)
    found = stage_results.results_of(Stage("forced_generation", 0, [wide()]), {name: own}, True)
    assert [outcome.excess < 1 for outcome in found] == [True]


def wide() -> Any:
    """A stage that rounds so coarsely that the format's errors are within its floor."""
    process: Any = judged(compared("split_k"))
    rows = process.rows.with_columns(floor=0.5 + 0.0 * process.rows.get_column("floor"))
    return dataclasses.replace(process, rows=rows)


@pytest.mark.parametrize(
    ("make", "holds"),
    [
        (bf16, True),
        (fp16, True),
        (lambda x: bf16(bf16(x) * np.float32(1.002)), True),
        # another temperature as well: a rounding does not make so much
        (lambda x: bf16(np.float32(x) * np.float32(1.3)), False),
        (lambda x: fp16(np.roll(x, 1)), False),
    ],
)
def test_a_rounding_explains_no_more_than_it_makes(make: Any, holds: bool) -> None:
    pairs = [(f"s{n}", as_is(row), make(row)) for n, row in enumerate(VALUES)]
    fit = OfTokens().fit(Tokens(NAME, pairs, 1e-6))
    assert fit is not None and fit.holds is holds
