"""Is a later step of verl's Megatron engine judged as the first is?

Two ranks of a distributed optimizer keep the state; the target has one rank or two. Real verl on
the CPU (see test_megatron); long, because each run takes its time to start.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.plan import pairs, plan
from rlprobe.selftest.forkservers import ForkServers
from tests.e2e.test_megatron import LAYOUTS, Megatron
from tests.e2e.test_megatron import pytestmark as _of_megatron

pytestmark = [*_of_megatron, pytest.mark.long]


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory, servers: ForkServers) -> Megatron:
    made = Megatron(tmp_path_factory.mktemp("rejoin-megatron"), servers)
    made._raw |= {
        "steps": {"total": 2, "start": 0, "end": 1},
        "controls": {"repeat": True, "rejoin": True},
    }
    return made


def judged(verl: Megatron, jobs: Jobs) -> Diagnosis:
    runs = dict(jobs.runs)
    runs["target"] = dataclasses.replace(runs["target"], fault_step=1)
    return verl.judge(dataclasses.replace(jobs, runs=runs))


def state(found: Diagnosis) -> str:
    item = next(item for item in found.gate if item.item == "state at the start")
    assert item.state == "open", item.evidence
    return item.evidence


def test_a_fault_of_the_second_step_is_found_there(verl: Megatron) -> None:
    fault = f"{verl.directory / 'faults.py'}:epsilon"
    found = judged(verl, verl.jobs("two", 2, LAYOUTS["data"], fault=fault, environment={}))
    assert found.first is not None, found.sentence
    assert (found.verdict, found.first.step) == ("diverged", 1), found.sentence
    assert found.first.stage == "actor_compute_log_prob"
    assert found.first.module == "model.layers.2.input_layernorm"
    assert "Step 0 before it agrees." in found.sentence
    assert "weights of" in state(found)
    weights = next(item for item in found.gate if item.item == "weights")
    assert weights.state == "open", weights.evidence


def test_one_rank_takes_over_from_two(verl: Megatron) -> None:
    two = verl.jobs("one", 2, LAYOUTS["data"], environment={}).alignment
    alone = two.target.model_copy(update={"world_size": 1})
    alignment = two.model_copy(update={"target": alone})
    runs = plan(alignment, {})
    found = verl.judge(Jobs(alignment, runs, pairs(runs)))
    assert found.verdict == "aligned", found.sentence
    assert "Steps 0 and 1 were judged" in found.sentence
    assert "optimizer's state of" in state(found)
    states = verl.directory / "store/runs" / runs["benchmark"].key / "states/step1"
    kept = json.loads((states / "actor-rank1.json").read_text())
    assert kept["world_size"] == 2 and "DistributedOptimizer" in kept["optimizer"]
