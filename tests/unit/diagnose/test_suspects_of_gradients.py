"""Where a gradient's sum differs while every micro-batch's agrees, what adds it up is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.judge import floors, noise, origin
from rlprobe.judge.stage import _process
from rlprobe.refine import suspects
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

TWO = Path(__file__).parent / "two_updates"
Harm = Callable[[np.ndarray], np.ndarray]


def of_one(harm: Harm, which: int) -> Harm:
    """``harm`` of one parameter's gradient, by its number."""
    calls = itertools.count()
    return lambda gradient: harm(gradient) if next(calls) == which else gradient


def shuffled(gradient: np.ndarray) -> np.ndarray:
    return np.roll(gradient.ravel(), 3).reshape(gradient.shape)


@pytest.mark.parametrize("harm", [shuffled, lambda g: 0 * g, lambda g: g + np.float32(0.01)])
def test_a_sum_that_differs_alone_is_looked_at_where_it_is_made(align: Align, harm: Any) -> None:
    alignment = align(Device(split=True, faults={"reduce": of_one(harm, 5)}))
    assert main(["diagnose", str(alignment.results)]) == 0
    wanted = suspects.find(alignment.results, 1).suspects
    assert wanted is not None and wanted.stage == "actor_update"
    assert (wanted.trace, wanted.trace_module, wanted.micro_steps) == ("update", None, ())
    assert wanted.record.endswith(".grad_reduced.0.debug") and wanted.modules


def test_a_gradient_that_differs_in_its_pass_is_looked_at_in_its_module(align: Align) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    alignment = align(Device(split=True, faults={f"weight gradient {name}": shuffled}))
    assert main(["diagnose", str(alignment.results)]) == 0
    wanted = suspects.find(alignment.results, 1).suspects
    assert wanted is not None and wanted.trace == "module"
    assert wanted.trace_module == name.removesuffix(".weight")
    assert wanted.micro_steps == (0,)


def _later(name: str) -> Any:
    """The finding of two updates' records, which part in the second one's forward pass."""
    rows = pl.read_parquet(TWO / f"{name}.parquet").with_columns(
        dense_error=pl.lit(None, pl.Float64)
    )
    process = _process(0, floors.with_floor(noise.annotate(rows), {}), one_precision=True)
    found = origin.find(process.rows, process.calls)
    assert found is not None
    return SimpleNamespace(origin=found, stage=SimpleNamespace(rows=process.rows))


@pytest.mark.parametrize(
    ("name", "trace"),
    [
        ("adam_eps", "update"),
        ("second_update_wrong", "update"),
        ("second_critic_gradients_scaled", "update"),
        ("second_pass_up_scaled", "module"),
    ],
)
def test_an_update_that_later_passes_show_is_what_is_looked_at(name: str, trace: str) -> None:
    finding = _later(name)
    assert suspects._traced(finding, suspects._is_late(finding)) == trace
