"""Is a later step judged exactly as the first is, and can runs begin from a checkpoint?

Real verl in one process (see test_inprocess); what is collected serves all trials of this file.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.judge import tables
from rlprobe.judge.inputs import Results
from rlprobe.runs.launch import Started, launch
from rlprobe.runs.plan import plan
from rlprobe.selftest import alignments, catalogue
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial
from rlprobe.store.read import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def judged(pipeline: Pipeline, name: str) -> tuple[Judged, Diagnosis]:
    """A case of the self-test, planted from the second step on."""
    found = pipeline.judge(Trial(catalogue.cases(only=[name])[0], step=1))
    return found, found.diagnosis


def test_both_steps_agree_under_other_kernels(pipeline: Pipeline) -> None:
    found, diagnosis = judged(pipeline, "split_k")
    assert diagnosis.verdict == "aligned", diagnosis.sentence
    assert "Steps 0 and 1 were judged, each from the benchmark's state." in diagnosis.sentence
    results = Results.open(found.directory)
    for stage, steps in diagnosis.extent.items():
        if stage != "trainer":
            assert steps[0].judged == steps[1].judged > 100, stage
    began = next(item for item in diagnosis.gate if item.item == "state at the start")
    assert began.state == "open", began.evidence
    # actor and critic have 27 and 28 parameters, and AdamW a state of each
    assert "weights of 55 parameters and the optimizer's state of 55" in began.evidence
    weights = next(item for item in diagnosis.gate if item.item == "weights")
    assert weights.state == "open", weights.evidence
    # a repeat that was joined repeats the second step bit for bit: the state is whole
    runs = [results.run(role) for role in ("benchmark", "repeat")]
    assert runs[0] is not None and runs[1] is not None
    for stage in results.stages("repeat"):
        one, other = (
            pl.read_parquet(run.records(stage)).drop("stack") for run in runs if run is not None
        )
        assert one.filter(pl.col("step") == 1).height > 100
        assert other.equals(one, null_equal=True), stage


@pytest.mark.parametrize(
    ("name", "stage", "module", "cause"),
    [
        ("rms_eps", "actor_compute_log_prob", "model.layers.1.input_layernorm", None),
        ("learning_rate", "critic_update", None, "hyperparameter"),
    ],
)
def test_a_fault_of_the_second_step_alone_is_found_there(
    pipeline: Pipeline, name: str, stage: str, module: str | None, cause: str | None
) -> None:
    found, diagnosis = judged(pipeline, name)
    assert diagnosis.first is not None and diagnosis.cause is not None, diagnosis.sentence
    first = diagnosis.first
    assert (diagnosis.verdict, first.step, first.stage, first.module) == (
        "diverged", 1, stage, module,
    )  # fmt: skip
    assert cause in (None, diagnosis.cause.class_)
    assert "Step 0 before it agrees." in diagnosis.sentence
    table = tables.read_table(Results.open(found.directory), stage)
    assert table.filter((pl.col("step") == 0) & pl.col("beyond")).is_empty()


def test_runs_begin_from_a_checkpoint_of_verls_own(servers: ForkServers, tmp_path: Path) -> None:
    """verl saves after its first step; the run that begins there has what verl had."""
    kept = tmp_path / "kept"

    def saving(run: Started) -> tuple[int, Mapping[str, str]]:
        words = [w.replace("trainer.save_freq=-1", "trainer.save_freq=1") for w in run.commands[-1]]
        ended = servers(dataclasses.replace(run, commands=[*run.commands[:-1], words]))
        shutil.copytree(run.scratch / "checkpoints", kept)
        return ended

    needs = {"steps": 2, "algorithm": "grpo"}
    store = tmp_path / "store"
    whole = alignments.alignment(needs, store=str(store), results=str(tmp_path), name="a")
    first = launch(plan(whole, {})["benchmark"], store, start=saving).parent
    checkpoint = str(kept / "global_step_1")
    one = whole.steps.model_copy(update={"total": 1, "end": 0})
    resumed = whole.model_copy(update={"resume_from": checkpoint, "steps": one})
    second = launch(plan(resumed, {})["benchmark"], store, start=servers).parent

    runs = [Run.open(store, path.name) for path in (first, second)]
    assert [run.manifest.first_step for run in runs] == [1, 2]
    tables_ = [run.weights() for run in runs]
    assert tables_[0] is not None and tables_[1] is not None
    chosen = ["stage", "role", "rank", "name", "digest"]
    trained = pl.col("role") == "actor"
    before, after = (
        table.filter((pl.col("step") == step) & trained).select(chosen)
        for table, step in ((tables_[0], 1), (tables_[1], 0))
    )
    assert after.height > 50 and after.equals(before)
    start = tables_[0].filter((pl.col("step") == 0) & trained).select(chosen)
    assert not after.equals(start), "it was trained before the checkpoint"
