"""One bound on the norm explains both sides' clipped gradients, whatever these differ by."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.gate import clipping, gradient_norms
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.test_diagnose_gate import items
from tests.unit.diagnose.transformer import Device

SUMMED = 1e-4


@pytest.mark.parametrize(
    ("benchmark", "target", "agree"),
    [
        # gradients in bf16 differ by per cents, and both are clipped to 1
        ((3.6, 1.0), (3.75, 1.0), True),
        ((3.6, 1.0), (3.6, 0.99), False),
        # neither is clipped, or a side is scaled without need
        ((0.6, 0.6), (0.63, 0.63), True),
        ((0.6, 0.6), (0.63, 0.55), False),
        # one lies above the bound, the other below it
        ((1.02, 1.0), (0.97, 0.97), True),
        ((0.97, 0.97), (1.02, 1.0), True),
        ((1.02, 1.0), (1.5, 1.5), False),
        ((1.5, 1.5), (1.02, 1.0), False),
    ],
)
def test_the_bound_is_one_on_both_sides(
    benchmark: tuple[float, float], target: tuple[float, float], agree: bool
) -> None:
    assert clipping._agree((benchmark, target), SUMMED) is agree


def rows(scale: float, *, dtype: str = "torch.float32", lost: bool = False) -> pl.DataFrame:
    random = np.random.default_rng(1)
    found: list[dict[str, Any]] = []
    for update in (0, 1):
        own = random.uniform(0.5, 2.0, 9)
        other = own * random.uniform(0.9, 1.1, 9)
        bound = scale if update else 1.0
        for slot, b, t in (
            ("grad_reduced", own, other),
            ("grad_clipped", own / np.linalg.norm(own), bound * other / np.linalg.norm(other)),
        ):
            found += [
                {"slot": slot, "call": update, "name": f"p{n}", "norm_benchmark": left,
                 "norm_target": None if lost and n == 3 else right,
                 "dtype_benchmark": dtype, "dtype_target": dtype}
                for n, (left, right) in enumerate(zip(b, t, strict=True))
            ]  # fmt: skip
    return pl.DataFrame(found)


def test_the_update_that_is_clipped_otherwise_is_the_second() -> None:
    table = rows(0.99)
    wrong = [u for u, own in clipping._updates(table) if not clipping._agree(own, SUMMED)]
    assert wrong == [1]
    fine = [clipping._agree(own, SUMMED) for _, own in clipping._updates(rows(1.0))]
    assert fine == [True, True]


def test_of_gradients_that_are_not_all_there_nothing_is_said() -> None:
    assert list(clipping._updates(rows(0.99, lost=True))) == []


@pytest.mark.parametrize(("bound", "wrong"), [(1.0, []), (0.99, [1]), (2.0, [1])])
def test_parts_that_are_counted_twice_show_the_factor_and_the_reported_norm_the_bound(
    monkeypatch: pytest.MonkeyPatch, bound: float, wrong: list[int]
) -> None:
    """Tensor-parallel ranks have some gradients alike; here each third one, on one side alone."""
    table = rows(bound)
    copies = [f"p{n}" for n in (0, 3, 6)]
    root_2 = pl.when(pl.col("name").is_in(copies)).then(2**0.5).otherwise(1.0)
    twice = table.with_columns(norm_target=pl.col("norm_target") * root_2)
    before = table.filter(slot="grad_reduced").partition_by("call")
    each = {side: {u: float(np.linalg.norm(own[f"norm_{side}"])) for u, own in enumerate(before)}
            for side in ("benchmark", "target")}  # fmt: skip
    monkeypatch.setattr(gradient_norms, "totals", lambda run, role, step: each[run])
    evidence: Any = types.SimpleNamespace(
        benchmark="benchmark", target="target", step=types.SimpleNamespace(number=0)
    )
    found = list(clipping._reported(clipping._updates(twice), evidence, "actor"))
    assert [u for u, own in found if not clipping._agree(own, SUMMED)] == wrong
    assert len(found) == 2
    each["target"].pop(1)  # a rank reports another norm, or none
    assert [u for u, _ in clipping._reported(clipping._updates(twice), evidence, "actor")] == [0]


def test_norms_in_16_bits_are_held_to_what_16_bits_have() -> None:
    assert clipping._allowed(rows(1.0)) == SUMMED
    assert 1e-3 < clipping._allowed(rows(1.0, dtype="torch.bfloat16")) < 1e-2


@pytest.mark.slow
def test_it_is_said_of_what_was_recorded(align: Align) -> None:
    said = items(align(Device(split=True), repeat=False))
    assert "recorded alike" not in said or "clipping" not in said["recorded alike"].evidence
    found = items(align(Device(split=True, faults={"clip": 0.5}), repeat=False, name="b"))
    assert "clipping leaves gradients a norm of" in found["recorded alike"].evidence
