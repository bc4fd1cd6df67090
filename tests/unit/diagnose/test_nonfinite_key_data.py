"""Is key data that is not finite on one side alone ever read as agreement?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.judge import keydata, reasons, tables
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Array, Row
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow


def with_(value: float, *places: int) -> Callable[[Array], Array]:
    def change(values: Array) -> Array:
        changed = np.array(values)
        changed[..., list(places)] = value
        return changed

    return change


@pytest.mark.parametrize(
    ("fault", "change", "stage", "name"),
    [
        ("entropies", with_(np.nan, 1, 6), stages.LOG_PROB, "entropys"),
        ("entropies", with_(np.inf, 3), stages.LOG_PROB, "entropys"),
        ("answers", with_(np.nan, 4), stages.LOG_PROB, "old_log_probs"),
        ("answers", with_(-np.inf, 0), stages.LOG_PROB, "old_log_probs"),
        ("said advantages", with_(np.nan, 7), stages.ACTOR_UPDATE, "advantages"),
    ],
)
def test_it_is_found_where_it_first_is(
    align: Align, fault: str, change: Any, stage: str, name: str
) -> None:
    alignment = align(Device(split=True, faults={fault: change}, stage=stage), repeat=False)
    found = alignment.diagnose()
    assert found.verdict == "diverged", found.sentence
    assert found.first is not None and found.cause is not None
    assert (found.first.stage, found.first.module) == (stage, None)
    assert found.first.operator == name and found.cause.class_ == "nonfinite"
    said = " ".join(found.cause.evidence)
    assert f"{name}: not finite at " in said and "on the target only" in said
    # the error of what is finite in it is not what it parts by
    assert f"in the {name}. " in found.sentence, found.sentence
    table = tables.read_table(Results.open(alignment.results), stage)
    row = table.row(by_predicate=(pl.col("name") == name) & pl.col("beyond"), named=True)
    assert row["status"] == "nonfinite" and row["lopsided"] > 0


def rows(*values: float) -> list[Row]:
    return [Row("s", np.array(values, np.float32), 0, 0)]


@pytest.mark.parametrize(
    ("benchmark", "target", "alone", "both", "error"),
    [
        ((1, 2, np.nan), (1, 2, 3), (1, 0), 0, 0.0),
        ((1, 2, 3), (1, np.nan, np.inf), (0, 2), 0, 0.0),
        ((1, np.inf), (1, -np.inf), (1, 1), 0, 0.0),  # infinite the other way round
        ((3, np.inf, np.nan), (3, np.inf, np.nan), (0, 0), 2, 0.0),
        ((3, 4, np.nan), (3, 4.5, np.nan), (0, 0), 1, 0.1),  # the rest is still compared
    ],
)
def test_each_side_is_counted(
    benchmark: Any, target: Any, alone: tuple[int, int], both: int, error: float
) -> None:
    found = keydata.compare(rows(*benchmark), rows(*target), "values", 0)
    assert (found.lopsided, found.both_nonfinite, found.count) == (alone, both, len(benchmark))
    assert found.error == pytest.approx(error)


def test_the_rest_of_a_sample_does_not_hide_behind_equal_nans(align: Align) -> None:
    """NaN at the same places on both sides is no difference, and another number beside it is."""

    def change(values: Array) -> Array:
        return with_(np.nan, 2)(values) * np.float32(1.3)

    both = Device(split=True, faults={"entropies": with_(np.nan, 2)})
    same = align(both, benchmark=Device(faults=both.faults), repeat=False).diagnose()
    assert same.verdict == "aligned", same.sentence
    scaled = Device(split=True, faults={"entropies": change}, stage=stages.LOG_PROB)
    other = align(scaled, benchmark=Device(faults=both.faults), repeat=False, name="b").diagnose()
    assert other.verdict == "diverged", other.sentence
    assert reasons.GIVEN in other.extent[stages.LOG_PROB][0].unjudged


def test_rewards_that_are_not_finite_shut_the_gate(align: Align) -> None:
    fault = {"rewards": with_(np.nan, 0)}
    found = align(Device(split=True, faults=fault), repeat=False).diagnose()
    assert found.verdict == "not_comparable"
    assert "not finite at " in found.sentence
