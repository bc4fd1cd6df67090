"""A real vLLM as verl starts it: under Ray, its server an actor, its workers the actor's children.

The other tests here ask the same server without Ray; this says that it is the same run.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.config import load
from rlprobe.judge import engine, engine_weights
from rlprobe.roles import BENCHMARK
from rlprobe.rollouts import hdf5
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import plan
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.store.read import Run

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe, pytest.mark.long]
UnderRay = Callable[..., tuple[Path, Run]]


@pytest.fixture(scope="module")
def under_ray(tmp_path_factory: pytest.TempPathFactory, python: str) -> UnderRay:
    work = tmp_path_factory.mktemp("vllm-ray")

    def one(name: str, *overrides: str, ranks: int = 1) -> tuple[Path, Run]:
        raw = yaml.safe_load((ROOT / "config/examples/verl_vllm_cpu.yaml").read_text())
        raw |= {
            "name": name,
            "ray": True,
            "store": str(work / "store"),
            "results": str(work / "results"),
            "overrides": [*raw["overrides"], *overrides],
            "capture": {"engine": "msprobe", "task": "tensor", "token_range": [0, 1]},
        }
        for side in ("benchmark", "target"):
            raw[side] |= {"world_size": ranks}
        config = work / f"{name}.yaml"
        config.write_text(yaml.safe_dump(raw))
        shared = queues()
        # a run's processes are of the Python that started it
        done = subprocess.run(
            [python, "-m", "rlprobe", "run", "--config", config, "--role", BENCHMARK],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        assert queues() <= shared, "vLLM's queues are left in this machine's memory"
        return config, Run.open(work / "store", plan(load(config), {})[BENCHMARK].key)

    return one


def queues() -> set[str]:
    """Segments that Python made in shared memory, vLLM's queues among them."""
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def agrees(run: Run, ranks: int, out: Path) -> None:
    """Engine and training, in every record and weight of both steps."""
    assert main(["compare", "--train-infer", str(run.path), "-o", str(out)]) == 0
    table = pl.read_parquet(out / "train_infer/records.parquet")
    assert set(table["rank"]) == set(range(ranks))
    for step in (0, 1):
        parts = engine.parts(table.filter(step=step))
        assert [part.phase for part in parts] == [engine.PREFILL, engine.DECODE]
        # a response of one token is over when its prompt is
        forwards = [8, decoded(run, step)]
        for part, each in zip(parts, forwards, strict=True):
            assert part.first is None and part.passes == each * ranks, str(part)
    for sync in engine_weights.of_run(run):
        assert sync.kind is None and sync.left == () and sync.compared == 27, sync


def decoded(run: Run, step: int) -> int:
    """How many of a step's responses have a second token, which is decoded."""
    masks = hdf5.read(run.rollouts[step]).tensors["response_mask"]
    return sum(int(np.sum(mask)) > 1 for mask in masks)


def test_under_ray_vllm_is_what_it_is_without(
    under_ray: UnderRay, tmp_path: Path, python: str
) -> None:
    config, run = under_ray("ray")
    assert run.manifest.stages[stages.GENERATE].state == "captured"
    agrees(run, 1, tmp_path / "ray")

    spec = dataclasses.replace(plan(load(config), {})[BENCHMARK], ray=False)
    assert spec.key == run.key
    with ForkServers(tmp_path / "logs", python) as servers:
        alone = Run.open(
            tmp_path / "store", launch(spec, tmp_path / "store", start=servers).parent.name
        )
    runs = (run, alone)
    # what is computed of prompts hangs on weights alone, whatever was drawn in what order
    assert prompts(run, 0) and prompts(run, 0) == prompts(alone, 0)
    if drawn(run, 0) == drawn(alone, 0):
        assert every(run, stages.GENERATE, 0).equals(
            every(alone, stages.GENERATE, 0), null_equal=True
        )
        for stage in (stages.LOG_PROB, stages.ACTOR_UPDATE):
            here, there = (every(side, stage, 0) for side in runs)
            assert here.height > 100 and here.equals(there, null_equal=True), stage
        weights = [pl.read_parquet(side.path / "weights.parquet") for side in runs]
        assert weights[0].equals(weights[1], null_equal=True)
        assert prompts(run, 1) == prompts(alone, 1)


def drawn(run: Run, step: int) -> list[str]:
    """Samples; vLLM has one generator for all requests, so that they hang on who came first."""
    return [sample.sample_digest for sample in hdf5.read(run.rollouts[step]).samples]


def every(run: Run, stage: str, step: int) -> pl.DataFrame:
    """A stage's records; where a call came from differs above verl's workers."""
    return pl.read_parquet(run.records(stage)).drop("stack").filter(step=step)


def prompts(run: Run, step: int) -> Counter[tuple[object, ...]]:
    """What the engine computed of prompts, in no order."""
    rows = every(run, stages.GENERATE, step).filter(
        (pl.col("slot") != "parameters") & (pl.col("shape").list.first() > 1)
    )
    named = rows.with_columns(pl.col("name").str.replace(r"\.forward\.\d+", ""))
    return Counter(named.select("name", "max", "min", "mean", "norm").rows())


def test_two_workers_of_one_engine_under_ray(under_ray: UnderRay, tmp_path: Path) -> None:
    _, run = under_ray("ray-tp2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2", ranks=2)
    agrees(run, 2, tmp_path / "tp2")
