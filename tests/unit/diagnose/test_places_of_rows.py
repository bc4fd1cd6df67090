"""Are samples that only come in another order inside a stage told from a difference?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.judge.excuses import positions
from rlprobe.judge.keydata import Row

NOTHING = pl.DataFrame(
    schema={"phase": pl.Int32, "slot": pl.String, "shape_benchmark": pl.List(pl.Int64),
            "shape_target": pl.List(pl.Int64), "status": pl.String}
)  # fmt: skip


class FakeRun:
    """A run without a proof, and the order in which its key data have their samples."""

    def __init__(self, *samples: str | None) -> None:
        self.rows = [Row(s, np.zeros(1), 0, at // 2, at % 2) for at, s in enumerate(samples)]

    def mock_proof(self) -> list[Any]:
        return []


def difference(monkeypatch: pytest.MonkeyPatch, stage: str, *runs: FakeRun) -> str | None:
    names = set(positions._OF_STAGE.values())

    def load(run: FakeRun, name: str, step: int) -> list[Row]:
        assert name in names and step == 0
        return run.rows

    monkeypatch.setattr("rlprobe.judge.excuses.positions.keydata.load", load)
    results: Any = type("R", (), {"run": lambda _, role: runs[role == "target"]})()
    return positions.difference(results, stage, 0, [NOTHING])


@pytest.mark.parametrize(
    "stage",
    [stages.REFERENCE, stages.LOG_PROB, stages.VALUES, stages.ACTOR_UPDATE, stages.CRITIC_UPDATE],
)
def test_every_stage_knows_its_rows(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    benchmark = FakeRun("a", "b", "c", "d")
    other = FakeRun("b", "a", "c", "d")
    assert difference(monkeypatch, stage, benchmark, other) == positions.SHUFFLED
    assert difference(monkeypatch, stage, benchmark, FakeRun("a", "b", "c", "d")) is None


@pytest.mark.parametrize(
    "samples",
    [
        ("a", "b", "c", "x"),  # another sample: the gate's business
        ("a", "b", "c", None),  # nothing tells
        ("a", "b", "c"),
    ],
)
def test_what_is_not_the_same_samples_is_no_other_order(
    monkeypatch: pytest.MonkeyPatch, samples: tuple[str | None, ...]
) -> None:
    benchmark = FakeRun("b", "a", "c", "d")
    assert difference(monkeypatch, stages.LOG_PROB, benchmark, FakeRun(*samples)) is None
