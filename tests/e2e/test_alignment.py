"""Does real VeRL, run on two "devices", end in a verdict one can trust?"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.store.read import Run
from tests.e2e.conftest import ROOT, Aligned, command
from tests.e2e.expected import VENDORS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TRAINING = [s for s in stages.TRAINING_STAGES if s != stages.TEACHER]


def _records(run: Path, stage: str) -> pl.DataFrame:
    return pl.read_parquet(run / "records" / f"{stage}.parquet")


def test_the_default_is_aligned_and_says_where_its_page_is(aligned: Aligned) -> None:
    assert aligned.diagnosis["verdict"] == "aligned"
    assert f"page: {aligned.results}/report.html" in aligned.output
    assert aligned.diagnosis["sentence"] in aligned.output
    assert (aligned.results / "report.html").stat().st_size > 10_000


def test_the_page_measures_training_against_rollout_on_both_sides(aligned: Aligned) -> None:
    """The engine of the CPU computes what training does, so the gap is round-off."""
    page = (aligned.results / "report.html").read_text(encoding="utf-8")
    section = page[page.index('<section id="mismatch"') :]
    rows = re.findall(
        r'<span lang="en">(\w+)</span><span lang="zh">\w+</span></th>'
        r'<td[^>]*><span lang="en">what was generated</span>.*?<td class="n">(\d+)</td>'
        + r"<td[^>]*>([^<]+)</td>"
        * 9,
        section,
    )
    sides = {side: [float(n) for n in numbers] for side, *numbers in rows[:2]}
    assert set(sides) == {"benchmark", "target"} and len(rows) == 4, "both steps are there"
    for tokens, mean, tail, largest, k1, k3, low, high, trained, generated in sides.values():
        assert tokens == 8 * 16
        assert 0 <= mean <= tail <= largest < 1e-4
        assert abs(k1) <= mean and 0 <= k3 <= largest**2
        assert low == high == 1.0 and trained == generated > 1, "to three digits"
    assert "On the benchmark side engine and training agree in all 2 blocks" in section
    assert sides["target"] != sides["benchmark"], "the target's kernels are others"


def test_the_exit_status_of_verdict_says_aligned(aligned: Aligned) -> None:
    assert command("rlprobe", "verdict", aligned.results / "diagnosis.json").returncode == 0


def test_its_differences_are_not_zero_and_lie_under_the_floor(aligned: Aligned) -> None:
    beyond = {entry["stage"]: entry["beyond"] for entry in aligned.diagnosis["stages"]}
    for stage in TRAINING:
        table = pl.read_parquet(aligned.results / "compare/target" / stage / "records.parquet")
        assert table["error"].drop_nulls().max() > 0, stage
        assert beyond[stage] == 0, stage


def test_the_benchmark_has_all_six_stages_and_a_replay_five(aligned: Aligned) -> None:
    benchmark = json.loads((aligned.run("benchmark") / "manifest.json").read_text())["stages"]
    assert set(benchmark) == {stages.GENERATE, *TRAINING}
    assert all(stage["state"] == "captured" for stage in benchmark.values())
    target = json.loads((aligned.run("target") / "manifest.json").read_text())["stages"]
    assert target[stages.GENERATE]["state"] == "replayed"
    assert {s for s, found in target.items() if found["state"] == "captured"} == set(TRAINING)
    assert not (aligned.results / "compare/target" / stages.GENERATE).exists()


def test_every_sample_trained_on_was_recorded_by_the_benchmark(aligned: Aligned) -> None:
    def trained(role: str) -> dict[tuple[int, str], list[str]]:
        proof = json.loads((aligned.run(role) / "mock_proof.json").read_text())
        return {(row["step"], row["stage"]): row["samples"] for row in proof["samples"]}

    benchmark, target = trained("benchmark"), trained("target")
    assert set(target) >= {(step, stage) for step in (0, 1) for stage in TRAINING}
    for place, samples in target.items():
        assert samples == benchmark[place]
        assert len(samples) == 8


def test_the_repeat_is_bitwise_the_benchmark(aligned: Aligned) -> None:
    for stage in TRAINING:
        ours = _records(aligned.run("benchmark"), stage)
        again = _records(aligned.run("repeat"), stage)
        assert ours.height > 20, stage
        assert ours.equals(again), stage


def test_the_repeat_costs_the_store_next_to_nothing(aligned: Aligned) -> None:
    def objects(run: Path) -> dict[str, int]:
        files = json.loads((run / "manifest.json").read_text())["files"]
        return {file["sha256"]: file["size"] for file in files}

    benchmark, repeat = objects(aligned.run("benchmark")), objects(aligned.run("repeat"))
    new = sum(size for digest, size in repeat.items() if digest not in benchmark)
    assert new < 0.02 * sum(benchmark.values())


def test_update_stages_record_every_parameters_change(aligned: Aligned) -> None:
    for stage in stages.UPDATE_STAGES:
        table = _records(aligned.run("benchmark"), stage)
        changes = table.filter((pl.col("slot") == "change") & (pl.col("step") == 0))
        weights = pl.read_parquet(aligned.run("benchmark") / "weights.parquet")
        role = stages.MODEL_ROLE[stage]
        names = set(weights.filter(pl.col("role") == role)["name"])
        assert changes.height == len(names) > 20
        assert changes["norm"].min() > 0


def test_weights_are_digested_once_for_every_model(aligned: Aligned) -> None:
    weights = pl.read_parquet(aligned.run("target") / "weights.parquet")
    assert set(weights["role"]) == {"actor", "ref", "critic"}
    assert weights["digest"].null_count() == 0
    assert weights["complete"].all()


def test_metrics_of_every_step_are_kept(aligned: Aligned) -> None:
    run = aligned.run("target")
    steps = Run.open(run.parent.parent, run.name).metrics()
    assert [(s["step"], s["trainer_step"]) for s in steps] == [(0, 1), (1, 2)]
    assert math.isfinite(steps[0]["metrics"]["actor/pg_loss"])


def test_a_second_run_has_nothing_to_do(aligned: Aligned, align: Callable[[Path], Aligned]) -> None:
    again = align(aligned.config)
    assert again.status == 0
    assert "rlprobe run" not in again.output
    assert "run_" not in again.output
    assert f"page: {aligned.results}/report.html" in again.output


def test_the_page_comes_back_from_the_store_without_training(
    aligned: Aligned, align: Callable[[Path], Aligned]
) -> None:
    before = aligned.diagnosis
    manifests = {p: p.stat().st_mtime_ns for p in aligned.store.glob("runs/*/manifest.json")}
    shutil.rmtree(aligned.results)
    again = align(aligned.config)
    assert again.status == 0, again.output
    assert again.diagnosis == before
    after = {p: p.stat().st_mtime_ns for p in aligned.store.glob("runs/*/manifest.json")}
    assert after == manifests, "a training job ran"


def test_a_planted_fault_is_found_where_it_was_planted(faulty: Aligned) -> None:
    diagnosis = faulty.diagnosis
    assert diagnosis["verdict"] == "diverged"
    assert diagnosis["first"]["stage"] == stages.LOG_PROB
    assert diagnosis["first"]["module"] == "model.layers.1.input_layernorm"
    assert command("rlprobe", "verdict", faulty.results / "diagnosis.json").returncode == 3


def test_the_fault_shares_the_defaults_benchmark(aligned: Aligned, faulty: Aligned) -> None:
    assert faulty.run("benchmark") == aligned.run("benchmark")
    assert faulty.run("repeat") == aligned.run("repeat")
    assert faulty.run("target") != aligned.run("target")


def test_the_store_is_sound_afterwards(aligned: Aligned) -> None:
    done = command("rlprobe", "store", "verify", "--store", aligned.store)
    assert done.returncode == 0, done.stdout


def test_the_committed_tree_is_as_the_contract_says(aligned: Aligned) -> None:
    dump = aligned.run("benchmark") / "dump"
    for stage in (stages.GENERATE, *TRAINING):
        for step in (0, 1):
            rank = dump / stage / f"step{step}" / "rank0"
            for name in ("dump.json", "stack.json", "construct.json"):
                assert (rank / name).is_file(), rank / name
    keys = {path.name for path in (dump / "data").iterdir()}
    assert keys >= VENDORS
    micro = dump / "data/old_log_probs/step0/rank0/micro_step0"
    assert {path.suffix for path in micro.iterdir()} == {".npy", ".json"}
    configuration = json.loads((dump / "configurations.json").read_text())
    assert configuration["trainer"]["total_training_steps"] == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("name: [", "YAML"),
        ("stepps: {total: 2}", "stepps"),
        ("steps: {total: 0}", "total"),
        ('model: {path: "/no/such/model"}\ndata: {train_files: "builtin:arithmetic"}', "/no/such"),
    ],
)
def test_a_bad_configuration_is_one_clear_message(workspace: Path, line: str, said: str) -> None:
    text = (ROOT / "config/config.yaml").read_text()
    keys = tuple(f"{row.partition(':')[0]}:" for row in line.splitlines())
    kept = [
        block
        for block in text.split("\n\n")
        if not any(row.startswith(keys) for row in block.splitlines())
    ]
    path = workspace / "bad.yaml"
    path.write_text("\n\n".join([*kept, line]) + "\n")
    done = command("workflow/align", path)
    assert done.returncode == 2, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout
