"""Can an alignment stand on rollouts that verl saved itself, before anyone thought of one?

Real verl in one process (see test_inprocess): a run with its ``skip.rollout`` on, then a benchmark
and a target that replay what it left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.rollouts import hdf5
from rlprobe.runs.launch import Started, launch
from rlprobe.runs.plan import plan
from rlprobe.selftest import alignments
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.store.read import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long]


def test_what_verl_saved_is_replayed_by_both_sides(servers: ForkServers, tmp_path: Path) -> None:
    kept = tmp_path / "kept"

    def saving(run: Started) -> tuple[int, Mapping[str, str]]:
        words = [*run.commands[-1], "skip.rollout.enable=true", "skip.rollout.steps=[1]",
                 f"skip.rollout.dump_dir={kept}"]  # fmt: skip
        return servers(dataclasses.replace(run, commands=[*run.commands[:-1], words]))

    store = tmp_path / "store"
    plain = alignments.alignment(
        {"algorithm": "grpo"}, store=str(store), results=str(tmp_path), name="a"
    )
    first = launch(plan(plain, {})["benchmark"], store, start=saving).parent
    assert [path.name for path in kept.rglob("gen_batch.dp")] == ["gen_batch.dp"]

    benchmark = plain.benchmark.model_copy(update={"rollouts": str(kept)})
    runs = plan(plain.model_copy(update={"benchmark": benchmark}), {})
    replayed = launch(runs["benchmark"], store, start=servers).parent
    target = launch(runs["target"], store, start=servers).parent
    one, own, other = (Run.open(store, path.name) for path in (first, replayed, target))
    assert own.key != one.key and own.manifest.stages[stages.GENERATE].state == "replayed"
    # the same samples and rewards, and what only a prompt's own columns say besides
    told = [hdf5.read(run.rollouts[0]) for run in (one, own)]
    assert [s.sample_digest for s in told[0].samples] == [s.sample_digest for s in told[1].samples]
    assert [s.reward for s in told[0].samples] == [s.reward for s in told[1].samples]
    assert all(sample.prompt_identity for sample in told[1].samples)
    # training on them is the same to the last bit, and the target trained on them too
    samples = [run.manifest.recorded.samples for run in (one, own, other)]
    assert samples[0] and samples[0] == samples[1] == samples[2]
    records = [
        pl.read_parquet(run.records(stages.ACTOR_UPDATE)).drop("stack") for run in (one, own)
    ]
    assert records[0].height > 100 and records[1].equals(records[0], null_equal=True)
