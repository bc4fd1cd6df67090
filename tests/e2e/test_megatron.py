"""Real verl with its Megatron engine, on the CPU: is what was captured of it right, in each layout?

One benchmark is collected; every layout replays its rollouts, on one or two ranks over gloo.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.config import load
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.judge import unshard
from rlprobe.roles import BENCHMARK, REPEAT, TARGET
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import pairs, plan
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.spec import RunSpec
from rlprobe.stages import ACTOR_UPDATE, CRITIC_UPDATE, LOG_PROB, TEACHER, TRAINING_STAGES

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        __import__("importlib.util").util.find_spec("mbridge") is None,
        reason="mbridge of requirements/lock.txt is not installed",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")


def megatron(*options: str) -> tuple[str, ...]:
    return tuple(f"{model}.megatron.{option}" for model in MODELS for option in options)


LAYOUTS = {
    "data": megatron("use_distributed_optimizer=true"),
    "copies": megatron("use_distributed_optimizer=false"),
    "tensor": megatron("tensor_model_parallel_size=2"),
    "pipeline": megatron(
        "pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"
    ),
}

FAULTS = """
from rlprobe.selftest import fault

def layers(site):
    for chunk in site.model if isinstance(site.model, list) else [site.model]:
        yield from chunk.decoder.layers

@fault(stage="actor_compute_log_prob", module="model.layers.2.input_layernorm",
       cause="hyperparameter")
def epsilon(site):
    norms = [layer.input_layernorm for layer in layers(site) if layer.layer_number == 3]
    for norm in norms:
        norm.eps = 1e-2
    yield
    for norm in norms:
        norm.eps = 1e-6

@fault(stage="critic_update", cause="optimizer")
def unclipped(site):
    parts = getattr(site.optimizer, "chained_optimizers", [site.optimizer])
    for part in parts:
        part.config.clip_grad *= 2
    yield
    for part in parts:
        part.config.clip_grad /= 2
"""


class Megatron:
    """The example's alignment, its runs started in processes that have verl loaded."""

    def __init__(self, directory: Path, servers: ForkServers) -> None:
        self.directory = directory
        self._servers = servers
        raw = yaml.safe_load((ROOT / "config/examples/verl_megatron_cpu.yaml").read_text())
        raw |= {"store": str(directory / "store"), "results": str(directory / "results")}
        raw["capture"] |= {"token_range": None}
        self._raw = raw
        (directory / "faults.py").write_text(FAULTS)

    def jobs(
        self, name: str, world_size: int = 1, overrides: tuple[str, ...] = (), **target: Any
    ) -> Jobs:
        raw = json.loads(json.dumps(self._raw)) | {"name": name}
        raw["overrides"] += overrides
        for side in (BENCHMARK, TARGET):
            raw[side]["world_size"] = world_size
        raw[TARGET] |= target
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(raw))
        alignment = load(path)
        runs = plan(alignment, {})
        return Jobs(alignment, runs, pairs(runs))

    def run(self, spec: RunSpec) -> Path:
        return launch(spec, self.directory / "store", start=self._servers).parent

    def judge(self, jobs: Jobs) -> Diagnosis:
        for role in (BENCHMARK, REPEAT, TARGET):
            self.run(jobs.runs[role])
        out = Path(jobs.results)
        for pair, roles in jobs.pairs.items():
            left, right = (
                sides.resolve(str(self.directory / "store/runs" / jobs.runs[role].key), None)
                for role in roles
            )
            options = Options(pair=pair, stages=jobs.stages(pair), coverage=jobs.alignment.coverage)
            compare(left, right, out / "compare" / pair, options)
        (out / "alignment.json").write_text(json.dumps(jobs.described()))
        return diagnose(out)


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory, servers: ForkServers) -> Megatron:
    return Megatron(tmp_path_factory.mktemp("megatron"), servers)


@pytest.fixture(scope="module")
def alone(verl: Megatron) -> Jobs:
    """One rank: benchmark, repeat and a target with other kernels."""
    return verl.jobs("alone")


@pytest.fixture(scope="module")
def single(verl: Megatron, alone: Jobs) -> Path:
    """The replay on one rank that every layout is held against."""
    verl.run(alone.runs[BENCHMARK])
    return verl.run(alone.runs[REPEAT])


@pytest.fixture(scope="module")
def laid_out(verl: Megatron, alone: Jobs, single: Path) -> Callable[[str], Path]:
    """The same rollouts replayed in a layout of two ranks."""
    made: dict[str, Path] = {}

    def run(layout: str) -> Path:
        if layout not in made:
            spec = alone.runs[REPEAT]
            made[layout] = verl.run(
                dataclasses.replace(
                    spec, world_size=2, overrides=(*spec.overrides, *LAYOUTS[layout])
                )
            )
        return made[layout]

    return run


def metric(run: Path, name: str) -> float:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(float(line["metrics"][name]) for line in lines if "metrics" in line)


def key_data(run: Path, name: str) -> list[np.ndarray]:
    return [np.load(path) for path in sorted((run / "dump/data" / name).rglob("*.npy"))]


def test_aligned_with_other_kernels_in_every_stage(verl: Megatron, alone: Jobs) -> None:
    found = verl.judge(alone)
    assert found.verdict == "aligned", found.sentence
    judged = {stage.stage: stage.records for stage in found.stages}
    assert set(judged) >= set(TRAINING_STAGES) - {TEACHER}
    # 51 parameters' gradients before and after clipping and their changes
    assert all(judged[stage] > 3 * 51 for stage in (ACTOR_UPDATE, CRITIC_UPDATE))
    assert not [item for item in found.gate if item.state == "shut"]


def test_a_norms_epsilon_is_located_under_its_hugging_face_name(verl: Megatron) -> None:
    found = verl.judge(verl.jobs("epsilon", fault=f"{verl.directory}/faults.py:epsilon"))
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert (found.first.stage, found.first.module) == (LOG_PROB, "model.layers.2.input_layernorm")


def test_clipping_is_seen_where_it_happens(verl: Megatron) -> None:
    found = verl.judge(verl.jobs("unclipped", fault=f"{verl.directory}/faults.py:unclipped"))
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert found.first.stage == CRITIC_UPDATE
    assert "grad_clipped" in str(found.noise["first"]["record"]), found.noise["first"]


def test_a_fault_in_a_chunk_of_a_pipeline_has_its_global_name_and_rank(verl: Megatron) -> None:
    found = verl.judge(
        verl.jobs("chunk", 2, LAYOUTS["pipeline"], fault=f"{verl.directory}/faults.py:epsilon")
    )
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    assert (found.first.stage, found.first.module, found.first.rank) == (
        LOG_PROB, "model.layers.2.input_layernorm", 0,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["alone", *LAYOUTS])
def test_norms_of_gradients_are_those_that_verl_reports(
    single: Path, laid_out: Callable[[str], Path], layout: str
) -> None:
    run = single if layout == "alone" else laid_out(layout)
    for role in ("actor", "critic"):
        reported = metric(run, f"{role}/grad_norm")
        assert reported > 1
        assert [float(n[0]) for n in key_data(run, f"{role}_total_grad_norm")] == [
            pytest.approx(reported, rel=1e-6)
        ] * (1 if layout == "alone" else 2)
        norms = key_data(run, f"{role}_grad_norm")
        if layout == "copies":  # every data-parallel rank holds every gradient
            norms = norms[:1]
        assert math.sqrt(sum(float(np.square(n).sum()) for n in norms)) == pytest.approx(
            reported, rel=1e-5
        )
        assert reported == pytest.approx(metric(single, f"{role}/grad_norm"), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_all_ranks_are_the_whole_model(
    single: Path, laid_out: Callable[[str], Path], layout: str
) -> None:
    whole = pl.read_parquet(single / "weights.parquet").filter(pl.col("stage") == ACTOR_UPDATE)
    parts = pl.read_parquet(laid_out(layout) / "weights.parquet").filter(
        pl.col("stage") == ACTOR_UPDATE
    )
    assert set(parts["name"]) == set(whole["name"]) and whole.height == 4 * 12 + 3
    for expected in whole.iter_rows(named=True):
        shards = list(unshard.parameters(parts.filter(pl.col("name") == expected["name"])))
        assert all(shard.part.shape == tuple(expected["shape"]) for shard in shards)
        if all(shard.part.complete for shard in shards):
            assert {shard.digest for shard in shards} == {expected["digest"]}
        sketch, norm = unshard.sketch(shards), unshard.norm(shards)
        assert sketch is not None, expected["name"]
        assert norm == pytest.approx(expected["norm"], rel=1e-6)
        assert np.allclose(sketch, expected["sketch"], atol=1e-4 * expected["norm"] + 1e-6)


@pytest.mark.parametrize("slot", ["grad_reduced", "grad_clipped", "change"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_changes_of_all_ranks_are_the_wholes(
    single: Path, laid_out: Callable[[str], Path], layout: str, slot: str
) -> None:
    expected, found = (_records(run, slot) for run in (single, laid_out(layout)))
    assert set(found) == set(expected) and len(found) == 4 * 12 + 3
    for name, records in found.items():
        whole = expected[name][0]
        size = math.prod(whole["shape"])
        parts = [r for r in records if math.prod(r["shape"]) < size]
        assert sum(math.prod(part["shape"]) for part in parts) in (0, size), (name, parts)
        norms = [r["norm"] for r in records if r not in parts]
        if parts:
            norms.append(math.sqrt(sum(part["norm"] ** 2 for part in parts)))
        assert norms == [pytest.approx(whole["norm"], rel=2e-3, abs=1e-7)] * len(norms), name


def _records(run: Path, slot: str) -> dict[str, list[dict[str, Any]]]:
    table = pl.read_parquet(run / "records" / f"{ACTOR_UPDATE}.parquet")
    rows = table.filter(pl.col("slot") == slot).sort("rank")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows.iter_rows(named=True):
        found.setdefault(f"{row['module']}.{row['index']}", []).append(row)
    return found
