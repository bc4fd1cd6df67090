"""Is a run in one process, without Ray, the same computation as the run under Ray?

Everything is made a second time in a store of its own: rollouts are generated, replayed and
captured, and nothing of the first store is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.config import load
from rlprobe.rollouts import hdf5
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import plan
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.spec import RunSpec
from rlprobe.stages import GENERATE, TRAINING_STAGES
from rlprobe.store.read import Run
from tests.e2e.conftest import Aligned

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROLES = ("benchmark", "repeat", "target")
#: Metrics about the machine and not the training.
_MACHINE = ("timing", "perf", "agent_loop")


@pytest.fixture(scope="module")
def again(
    servers: ForkServers, runs: dict[str, RunSpec], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Benchmark, repeat and target without Ray: the same specifications, another store.

    The benchmark as an alignment with ``ray: false`` makes it, the others as the self-test does.
    """
    store = tmp_path_factory.mktemp("inprocess") / "store"
    alone = launch(dataclasses.replace(runs["benchmark"], ray=False), store).parent
    others = {role: launch(runs[role], store, start=servers).parent for role in ROLES[1:]}
    return {"benchmark": alone, **others}


@pytest.mark.parametrize("role", ROLES)
def test_every_record_of_every_training_stage_is_bitwise_the_same(
    aligned: Aligned, again: dict[str, Path], role: str
) -> None:
    stages = [s for s in TRAINING_STAGES if (again[role] / "records" / f"{s}.parquet").exists()]
    assert len(stages) == 5
    for stage in stages:
        ray, here = (
            # where a call came from differs above verl's workers
            pl.read_parquet(run / "records" / f"{stage}.parquet").drop("stack")
            for run in (aligned.run(role), again[role])
        )
        assert here.height > 100
        assert here.equals(ray, null_equal=True), _differences(ray, here)


def _differences(ray: pl.DataFrame, here: pl.DataFrame) -> str:
    if ray.height != here.height:
        return f"{ray.height} records under Ray, {here.height} here"
    unequal = [name for name in ray.columns if not ray[name].equals(here[name], null_equal=True)]
    return f"columns that differ: {unequal}"


@pytest.mark.parametrize("role", ROLES)
def test_weights_and_the_samples_trained_on_are_the_same(
    aligned: Aligned, again: dict[str, Path], role: str
) -> None:
    ray, here = (
        pl.read_parquet(run / "weights.parquet") for run in (aligned.run(role), again[role])
    )
    assert here.equals(ray, null_equal=True)
    assert _proof(again[role]) == _proof(aligned.run(role))


@pytest.mark.parametrize("role", ROLES)
def test_metrics_are_the_same_but_for_timings(
    aligned: Aligned, again: dict[str, Path], role: str
) -> None:
    ray, here = (_metrics(run) for run in (aligned.run(role), again[role]))
    assert len(here) == 2
    assert len(here[0]) > 30
    assert here == ray


def test_generation_is_the_same(aligned: Aligned, again: dict[str, Path]) -> None:
    ray, here = (
        hdf5.steps(run / "rollouts") for run in (aligned.run("benchmark"), again["benchmark"])
    )
    assert sorted(here) == sorted(ray) == [0, 1]
    for step in here:
        one, other = hdf5.read(ray[step]), hdf5.read(here[step])
        assert [s.sample_digest for s in other.samples] == [s.sample_digest for s in one.samples]
        assert [s.reward for s in other.samples] == [s.reward for s in one.samples]
        for name, tensor in one.tensors.items():
            assert _bytes(other.tensors[name]) == _bytes(tensor), name


def test_it_is_not_the_same_as_another_role(again: dict[str, Path]) -> None:
    """The comparison above can fail: other kernels give other numbers."""
    here, other = (
        pl.read_parquet(again[role] / "records" / "actor_update.parquet").drop("stack")
        for role in ("repeat", "target")
    )
    assert not here.equals(other, null_equal=True)


def _json(run: Path, name: str) -> Any:
    return json.loads((run / name).read_text())


def _proof(run: Path) -> list[dict[str, Any]]:
    """What was trained on, in its order, and what was generated, in the order of the samples."""
    found: list[dict[str, Any]] = _json(run, "mock_proof.json")["samples"]
    # requests are answered in the order they arrive
    generated = [row for row in found if row["stage"] == GENERATE]
    generated.sort(key=lambda row: (row["step"], row["samples"]))
    return [row for row in found if row["stage"] != GENERATE] + generated


def _metrics(run: Path) -> list[dict[str, float]]:
    return [
        {
            name: value
            for name, value in line["metrics"].items()
            if not name.startswith(_MACHINE) and "/perf/" not in name and "mfu" not in name
        }
        for line in Run.open(run.parent.parent, run.name).metrics()
    ]


def _bytes(tensor: Any) -> bytes:
    values = getattr(tensor, "values", tensor)
    return bytes(values.tobytes())


@pytest.mark.long
def test_two_ranks_are_the_same_as_under_ray(
    configure: Callable[..., Path], workspace: Path, tmp_path: Path
) -> None:
    """World size 2: rank 1 is a fork here and an actor there; both shard and reduce over gloo."""
    side = {"device": "cpu", "precision": "fp32", "world_size": 2}
    capture = {"engine": "light", "token_range": None}
    changes = {"benchmark": side, "target": side, "capture": capture, "steps": {"total": 1}}
    spec = plan(load(configure("config/config.yaml", "two-ranks", **changes)), {})["benchmark"]
    ray = launch(spec, workspace / "store").parent
    here = launch(dataclasses.replace(spec, ray=False), tmp_path / "store").parent
    for stage in TRAINING_STAGES:
        path = Path("records", f"{stage}.parquet")
        if (ray / path).exists():
            one, other = (pl.read_parquet(run / path).drop("stack") for run in (ray, here))
            assert other.get_column("rank").n_unique() == 2
            assert other.equals(one, null_equal=True), f"{stage}: {_differences(one, other)}"
    assert _metrics(here) == _metrics(ray)
