"""What is said of operators that stand on both sides, of sums of gradients, and of parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.refine import summed  # noqa: E402
from rlprobe.refine.observe import Observed, observe  # noqa: E402
from tests.unit.traced import Backwards, first, observed, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[[Tensor], Tensor]


def two(tmp_path: Path, right: Make, wrong: Make) -> Observed:
    sides = run(tmp_path / "b", wrapped(right))[0], run(tmp_path / "t", wrapped(wrong))[0]
    return observe(*sides)


def plain(y: Tensor) -> Tensor:
    return (y.abs() + 1).rsqrt().flip(1).exp()


def _of_other_code(y: Tensor) -> Tensor:
    return (y.abs() + y.mean(-1, keepdim=True).abs() + 1).rsqrt().flip(1).exp()


def _twice(y: Tensor) -> Tensor:
    return (y.abs() * y.sigmoid() + 1).rsqrt().flip(1).exp()


def _squared(y: Tensor) -> Tensor:
    return ((y.abs() + 1).rsqrt() ** 3).flip(1).exp()


@pytest.mark.parametrize("wrong", [_of_other_code, _twice, _squared])
def test_operators_of_both_sides_name_no_difference(tmp_path: Path, wrong: Make) -> None:
    """Other code runs some of the same: only what the other side lacks is said."""
    found = two(tmp_path, plain, wrong)
    assert found.first is not None
    for difference in found.differences:
        target, _, benchmark = difference.said.partition(" where the benchmark runs ")
        for name in ("aten::abs", "aten::rsqrt", "aten::exp"):
            assert not (name in target and name in benchmark), difference.said


def _used_twice(y: Tensor) -> Tensor:
    return y.sigmoid() * (2 * y).tanh() + y.exp() * 0.1


def _crude(y: Tensor) -> Tensor:
    return y.sigmoid() * Backwards.apply(2 * y, lambda g: 1.7 * g).tanh() + y.exp() * 0.1


def _thrice(y: Tensor) -> Tensor:
    z = y * 1.5
    return z.sin() + z.cos() * z.sigmoid() + z


@pytest.mark.parametrize("make", [_used_twice, _thrice, lambda y: y + y.sigmoid()])
def test_gradients_that_the_engine_adds_up_are_of_traced_operators(
    tmp_path: Path, make: Make
) -> None:
    trace = run(tmp_path, wrapped(make))[0]
    entering = [
        v.value for op in trace.operators if op.direction != "forward" for v in op.inputs
        if v.origin == "elsewhere" and len(v.shape) > 1
    ]  # fmt: skip
    # the first is what arrives
    assert summed.sums(trace) == {*entering[1:]} and len(entering) >= 2


def test_what_arrives_is_no_sum_of_what_comes_after(tmp_path: Path) -> None:
    other = run(tmp_path, wrapped(lambda y: Backwards.apply(y, torch.randn_like)))[0]
    assert summed.sums(other) == set()


def test_a_sum_of_wrong_gradients_is_no_value_from_elsewhere(tmp_path: Path) -> None:
    found = two(tmp_path, _used_twice, _crude)
    said = [d.said for d in found.differences]
    assert first(found).effective and not any("elsewhere" in words for words in said), said


def _rows(size: float) -> Make:
    """One small row, which the whole hides, times a number of its own."""

    def make(y: Tensor) -> Tensor:
        rows = torch.cat([1e6 * y, y[:1] * size])
        return y * rows[-1][None, :, :]

    return make


def test_a_part_that_the_whole_hides_is_no_other_layout(tmp_path: Path) -> None:
    found: Any = two(tmp_path, _rows(1.0), _rows(1.001))
    assert found.first is not None
    assert not any("numbers that agree before" in d.said for d in found.differences)


def test_views_that_differ_still_are_one(tmp_path: Path) -> None:
    right = wrapped(lambda y: y * y.roll(1, 1))
    sides = run(tmp_path / "b", right)[0], run(tmp_path / "t", wrapped(lambda y: y * y.flip(1)))[0]
    assert observe(*sides).first is not None
    assert observed(tmp_path / "c", lambda _: None).first is None
