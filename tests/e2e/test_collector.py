"""The vendor's way in: precision_collector.yaml on a plain verl command line."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from rlprobe import frameworks, stages
from rlprobe.cli import main
from rlprobe.dumps.key_data import KeyData
from rlprobe.frameworks import RunDirectories
from rlprobe.judge import engine as engine_judge
from rlprobe.rollouts import hdf5
from rlprobe.spec import RunSpec
from tests.e2e import expected
from tests.e2e.conftest import Aligned
from tests.e2e.server import Server, Variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe]

SIX = tuple(s for s in stages.STAGES if s not in (stages.FORCED, stages.TEACHER))
EVERYTHING = {**expected.EVERYTHING, "token_range_end": 1}


def _write(path: Path, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"precision_collector": options}))
    return path


@pytest.fixture(scope="module")
def collected(aligned: Aligned, runs: dict[str, RunSpec], workspace: Path) -> Path:
    """A plain verl command line under Ray with everything on; the directory it was started in."""
    directory = workspace / "collector"
    directory.mkdir(exist_ok=True)
    _write(directory / "precision_collector.yaml", **EVERYTHING)
    places = RunDirectories(directory, aligned.store / "assets")
    framework = frameworks.get("verl")
    spec = runs["benchmark"]
    # nothing of rlprobe's own switch: the field alone must do
    environment = {**os.environ, **framework.environment(spec, places)}
    environment["VERL_USE_EXTERNAL_MODULES"] = "rlprobe.frameworks.verl.cpu"
    environment.pop("RLPROBE_CONFIG", None)
    with (directory / "log").open("wb") as log:
        done = subprocess.run(
            [
                *framework.command(spec, places),
                "+ascend_precision_collector=precision_collector.yaml",
            ],
            cwd=directory,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 0, (directory / "log").read_text(errors="replace")[-3000:]
    return directory


def test_the_tree_is_the_contracts(collected: Path) -> None:
    dump = collected / "collector_save_path"
    for stage in SIX:
        place = dump / stage / "step0" / "rank0"
        assert {"dump.json", "stack.json", "construct.json"} <= {p.name for p in place.iterdir()}
        assert not (dump / stage / "step1").exists(), "step_end is 0"
    for name in expected.VENDORS:
        micro = dump / "data" / name / "step0/rank0"
        assert sorted(p.name for p in micro.iterdir()) == [f"micro_step{i}" for i in range(4)]
    assert (dump / "memory_snapshot").is_dir()
    assert json.loads((dump / "configurations.json").read_text())["algorithm"]


def test_no_stage_holds_records_of_another(collected: Path) -> None:
    dump = collected / "collector_save_path"
    for stage in (stages.REFERENCE, stages.LOG_PROB):
        data = json.loads((dump / stage / "step0/rank0/dump.json").read_text())["data"]
        heads = [name for name in data if name.startswith("Module.lm_head")]
        assert len(heads) == 4, "one forward for each of four micro batches"
        assert not any("backward" in name for name in data)


def test_a_collecting_run_also_writes_its_rollouts(collected: Path) -> None:
    rollouts = hdf5.steps(collected / "collector_save_path/rollouts")
    assert list(rollouts) == [0]
    assert len(hdf5.read(rollouts[0])) == 8


def _replayed(
    verl: Server, runs: dict[str, RunSpec], name: str, collected: Path, **options: Any
) -> Variant:
    scratch = collected / name
    config = _write(
        scratch / "precision_collector.yaml",
        msprobe=True,
        key_data_dump=True,
        dump_path=str(scratch / "dump"),
        enable_mock_inference=True,
        **options,
    )
    return verl.run(f"mock-{name}", runs["benchmark"], config=config)


def test_mock_inference_trains_on_what_was_collected(
    verl: Server, runs: dict[str, RunSpec], collected: Path
) -> None:
    variant = _replayed(
        verl,
        runs,
        "cycle",
        collected,
        mock_data_path=str(collected / "collector_save_path"),
        mock_random_seed=-1,
    )
    # step 0 is replayed; at step 1 the cycle offers step 0 again, whose prompts are others
    assert "8 samples replayed" in variant.log
    assert "the prompts of this step are not those" in variant.error
    for micro in range(4):
        name = f"data/responses/step0/rank0/micro_step{micro}/responses.npy"
        ours = np.load(collected / "cycle/dump" / name)
        assert np.array_equal(ours, np.load(collected / "collector_save_path" / name))


def test_a_step_that_was_not_collected_is_named(
    verl: Server, runs: dict[str, RunSpec], collected: Path
) -> None:
    variant = _replayed(
        verl, runs, "real", collected, mock_data_path=str(collected / "collector_save_path")
    )
    assert "step 1 was not recorded; recorded: 0" in variant.error


def test_a_wrong_option_stops_before_training(
    verl: Server, runs: dict[str, RunSpec], tmp_path: Path
) -> None:
    config = _write(tmp_path / "c.yaml", msprobe=True, step_strat=0)
    variant = verl.run("typo", runs["benchmark"], config=config)
    assert variant.status == 2
    assert "step_strat: unknown" in variant.error
    assert "Training Progress" not in variant.log


def test_the_master_switch_off_captures_nothing(
    verl: Server, runs: dict[str, RunSpec], tmp_path: Path
) -> None:
    config = _write(
        tmp_path / "c.yaml",
        msprobe=False,
        key_data_dump=True,
        actor_train_dump=True,
        dump_path=str(tmp_path / "out"),
    )
    variant = verl.run("off", runs["benchmark"], config=config)
    assert variant.status == 0, variant.log[-3000:]
    assert not (tmp_path / "out").exists()


def test_prompts_alone_are_one_forward_of_engine_and_trainer(
    verl: Server, runs: dict[str, RunSpec], tmp_path: Path
) -> None:
    config = _write(
        tmp_path / "precision_collector.yaml", msprobe=True, key_data_dump=True,
        actor_train_dump=True, task="tensor", dump_path=str(tmp_path / "dump"),
    )  # fmt: skip
    variant = verl.run(
        "prompts-only", runs["benchmark"], "trainer.total_training_steps=1",
        config=config, environment={"PROMPTS_ONLY": "1"},
    )  # fmt: skip
    assert variant.status == 0, variant.log[-3000:]
    data = KeyData(tmp_path / "dump/data")
    engine, trained = (data.rows(key, 0) for key in ("rollout_log_probs", "old_log_probs"))
    # builtin prompts have 31 tokens; the first is the prompt now
    assert {len(row.values) for row in engine} == {30} and len(engine) == 8
    for one, other in zip(engine, trained, strict=True):
        assert np.abs(one.values - other.values[:30]).max() < 1e-4
    out = tmp_path / "out"
    assert main(["compare", "--train-infer", str(tmp_path / "dump"), "-o", str(out)]) == 0
    (prefill,) = engine_judge.parts(pl.read_parquet(out / "train_infer/records.parquet"))
    assert prefill.phase == "prefill" and prefill.first is None and prefill.records > 100
