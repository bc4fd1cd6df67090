"""Are samples that only come in another order inside a stage told from a difference?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.judge import reasons
from rlprobe.judge.excuses import positions
from rlprobe.judge.keydata import Row
from tests.sampled import every_second
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

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


def difference(
    monkeypatch: pytest.MonkeyPatch, stage: str, *runs: FakeRun, of: pl.DataFrame = NOTHING
) -> str | None:
    names = set(positions._OF_STAGE.values())

    def load(run: FakeRun, name: str, step: int) -> list[Row]:
        assert name in names and step == 0
        return run.rows

    monkeypatch.setattr("rlprobe.judge.excuses.positions.keydata.load", load)
    results: Any = type("R", (), {"run": lambda _, role: runs[role == "target"]})()
    return positions.difference(results, stage, 0, [of])


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


CUTS: list[dict[str, Any]] = [{"micro": 1}, {"micro": 4}, {"order": [2, 0, 3, 1]}]
SAVES = {"saves results": True}
FAULTS: dict[str, dict[str, Any]] = {
    "mlp": {"output model.layers.1.mlp": lambda y: y * 1.05},
    "head": {"output lm_head": lambda y: y * 1.01},
    "epsilon": {"eps model.layers.1.input_layernorm": 1e-2},
}


def parted(align: Align, stage: str, cut: dict[str, Any], fault: str, saves: Any = SAVES) -> Any:
    target = Device(split=True, faults={**saves, **cut, **FAULTS[fault]}, stage=stage)
    return align(target, repeat=False, benchmark=Device(faults=dict(saves))).diagnose()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "name", "cut", "fault"),
    every_second(
        [
            (stages.REFERENCE, "ref_log_prob", CUTS[0], "mlp"),
            (stages.REFERENCE, "ref_log_prob", CUTS[1], "head"),
            (stages.REFERENCE, "ref_log_prob", CUTS[2], "epsilon"),
            (stages.LOG_PROB, "old_log_probs", CUTS[0], "head"),
            (stages.LOG_PROB, "old_log_probs", CUTS[1], "epsilon"),
            (stages.ACTOR_UPDATE, "update_log_probs", CUTS[0], "mlp"),
            (stages.ACTOR_UPDATE, "update_log_probs", CUTS[1], "head"),
            (stages.ACTOR_UPDATE, "update_log_probs", CUTS[2], "epsilon"),
        ]
    ),
)
def test_a_fault_is_placed_in_the_stage_whose_results_part(
    align: Align, stage: str, name: str, cut: dict[str, Any], fault: str
) -> None:
    found = parted(align, stage, cut, fault)
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert (found.first.stage, found.first.operator) == (stage, name), found.sentence


@pytest.mark.slow
@pytest.mark.parametrize("cut", every_second(CUTS), ids=str)
def test_one_update_is_one_however_its_micro_batches_are_cut(
    align: Align, cut: dict[str, Any]
) -> None:
    target = Device(split=True, faults={**SAVES, **cut})
    alignment = align(target, repeat=False, benchmark=Device(faults=dict(SAVES)))
    extent = alignment.diagnose().extent[stages.ACTOR_UPDATE][0]
    assert reasons.AFTER_UPDATE not in extent.unjudged, extent
    rows = pl.read_parquet(alignment.results / f"judged/{stages.ACTOR_UPDATE}.parquet")
    assert rows.filter(pl.col("name") == "update_log_probs").get_column("judged").to_list() == [
        True
    ]


@pytest.mark.slow
def test_a_stage_without_anything_judged_is_named_where_its_results_go(align: Align) -> None:
    """What is known is that gradients part: not that their reduction made it."""
    found = parted(align, stages.REFERENCE, CUTS[0], "mlp", {})
    assert found.first is not None and found.cause is not None, found.sentence
    assert (found.first.stage, found.first.operator) == (stages.ACTOR_UPDATE, "gradients")
    said = f"nothing of {stages.REFERENCE} was judged"
    assert any(said in line for line in found.cause.evidence), found.cause
    own = parted(align, stages.ACTOR_UPDATE, {}, "mlp")
    assert own.cause is not None and not any("nothing of" in line for line in own.cause.evidence)


#: Sequence first: other leading sizes of the same micro-batches.
TURNED = pl.DataFrame(
    {"phase": [0], "slot": ["output"], "shape_benchmark": [[2, 24, 8]],
     "shape_target": [[24, 2, 8]], "status": ["shape"]},
    schema_overrides={"phase": pl.Int32},
)  # fmt: skip


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (FakeRun("a", "b", "c", "d"), positions.SHAPED),
        (FakeRun("a", "c", "b", "d"), positions.SPLIT),
        (FakeRun("a", "b", "c", None), positions.UNTOLD),
        (FakeRun(), positions.UNTOLD),
    ],
)
def test_sizes_alone_say_nothing_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch, target: FakeRun, said: str
) -> None:
    benchmark = FakeRun("a", "b", "c", "d")
    assert difference(monkeypatch, stages.LOG_PROB, benchmark, target, of=TURNED) == said


def test_ranks_of_one_model_hold_the_same_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark, target = FakeRun("a", "b"), FakeRun("a", "b")
    target.rows += [Row(row.sample, row.values, 0, 1, row.micro_step) for row in benchmark.rows]
    assert difference(monkeypatch, stages.LOG_PROB, benchmark, target, of=TURNED) == (
        positions.SHAPED
    )
