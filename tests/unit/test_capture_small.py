"""Small tensors are measured together: are the records those of each measured alone, to the bit?"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.capture.light import onepass, small  # noqa: E402
from rlprobe.capture.light.statistics import Statistics  # noqa: E402

pytestmark = pytest.mark.slow

#: One number, parts and multiples of vectors and of a sketch's rows, models' sizes, the longest.
SIZES = [1, 2, 7, 16, 61, 64, 128, 256, 300, 896, 1023, 4096, 12_345, 30_001, onepass.LEAST - 1]


def tensors(count: int, rows: int = 9) -> list[Tensor]:
    drawn = torch.randn(rows, count, generator=torch.Generator().manual_seed(count))
    found = list((drawn * torch.logspace(-6, 6, count) + 0.5).unbind(0))
    found[1] = -found[1].abs()
    found[2] = torch.where(found[2] > 0.5, 0.0, -0.0)
    for at, bad in enumerate((math.nan, math.inf, -math.inf, 3e38)):
        found[3 + at] = found[3 + at].index_fill(0, torch.tensor([0, count // 2]), bad)
    return found


def leaves(values: list[Tensor], alone: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    with monkeypatch.context() as only:
        if alone:
            only.setattr(small, "takes", lambda tensor: False)
        statistics = Statistics(with_sketch=True)
        made: list[dict[str, Any]] = [statistics.leaf(value, lasting=None) for value in values]
        statistics.resolve()
    return json.dumps(made)


def test_numbers_are_those_of_each_tensor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [value for count in SIZES for value in tensors(count)]
    together = leaves(values, False, monkeypatch)
    assert together == leaves(values, True, monkeypatch)
    assert together.count('"NonFinite": "overflow"') and together.count('"NonFinite": "nan"')


def test_shapes_may_come_in_any_order_and_more_often_than_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = tensors(12_345, 60) + tensors(12) + tensors(24, 8)
    values = [*values[::-1], torch.arange(24.0).reshape(2, 3, 4), torch.arange(24.0).reshape(4, 6)]
    assert leaves(values, False, monkeypatch) == leaves(values, True, monkeypatch)


def test_what_changes_afterwards_was_read_before() -> None:
    statistics = Statistics(with_sketch=False)
    x = torch.ones(8, requires_grad=True)
    leaf = statistics.leaf(x, lasting=None)
    with torch.no_grad():
        x.mul_(3)
    assert x.grad_fn is None
    later = statistics.leaf(x, lasting=None)
    statistics.resolve()
    assert (leaf["Max"], later["Max"]) == (1.0, 3.0)


def test_only_small_fp32_tensors_in_order_on_a_cpu_are_taken() -> None:
    x = torch.randn(16, 16)
    assert small.takes(x)
    large = torch.zeros(onepass.LEAST)
    for other in (
        x.t(),
        x[:, :8],
        x.double(),
        x.bfloat16(),
        x.to("meta"),
        torch._neg_view(x),
        large,
    ):
        assert not small.takes(other)
