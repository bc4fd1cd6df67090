"""When does the workflow work again, and what for? On a store that is full already.

Real comparing, diagnosing and reporting of fabricated runs; what a training leaves is all that is
made up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rlprobe.documents import seal
from rlprobe.runs.jobs import Jobs
from tests.workflow import fabricate
from tests.workflow.project import Project

AFTER = {"diagnose": 1, "suspects": 1, "report": 1, "verdict": 1}


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A directory in which the workflow has run to its end."""
    project = Project(tmp_path_factory.mktemp("aligned") / "project", root)
    with pytest.MonkeyPatch.context() as patch:
        fabricate.store(project.jobs(patch))
    project.run()
    return project.directory


@pytest.fixture
def done(aligned: Path, tmp_path: Path, root: Path) -> Project:
    """A copy of that directory, Snakemake's records and file times included."""
    copy = tmp_path / "project"
    subprocess.run(["cp", "-a", str(aligned), str(copy)], check=True)
    for name in ("Snakefile", "workflow", "profiles", "config"):
        (copy / name).unlink()
    return Project(copy, root)


def test_the_results_are_where_they_are_promised(aligned: Path) -> None:
    results = aligned / "results" / "a"
    found = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}
    assert {"report.html", "diagnosis.json", "verdict.txt"} <= found
    assert "compare/target/actor_update/records.parquet" in found
    assert "compare/repeat/critic_update/summary.json" in found
    assert json.loads((results / "diagnosis.json").read_text())["verdict"] == "aligned"


def test_nothing_is_left_over(aligned: Path) -> None:
    left = [path for path in aligned.rglob("*") if path.name.endswith(".tmp")]
    assert left == []


def test_a_second_run_has_nothing_to_do(done: Project) -> None:
    assert done.planned() == {}


def test_touched_files_run_nothing(done: Project) -> None:
    for place in ("store/runs", "results", "a.yaml"):
        path = done.directory / place
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                os.utime(file)
    assert done.planned() == {}


@pytest.mark.long
def test_deleted_results_come_back_without_a_run(done: Project) -> None:
    page = done.directory / "results" / "a" / "report.html"
    before = json.loads((page.parent / "diagnosis.json").read_text())["verdict"]
    shutil.rmtree(done.directory / "results")
    assert done.planned() == {"sides": 2, "compare": 10, "plan": 1, **AFTER}
    done.run()
    assert page.exists()
    assert json.loads((page.parent / "diagnosis.json").read_text())["verdict"] == before


def test_deleted_records_of_snakemake_start_no_run_either(done: Project) -> None:
    shutil.rmtree(done.directory / ".snakemake")
    assert not any(rule.startswith("run_") for rule in done.planned())


def test_another_clone_with_the_same_store_starts_no_run(
    done: Project, tmp_path: Path, root: Path
) -> None:
    clone = Project(tmp_path / "clone", root)
    shutil.copytree(done.directory / "store", clone.directory / "store")
    assert clone.planned() == {"sides": 2, "compare": 10, "plan": 1, **AFTER}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"target": {"environment": {"OTHER": 1}}},
            {"run_target": 1, "sides": 1, "compare": 5, "plan": 1, **AFTER},
        ),
        ({"coverage": 0.5}, {"plan": 1, **AFTER}),
        (
            {"controls": {"high_precision": True}},
            {"run_high_precision": 1, "sides": 1, "compare": 5, "plan": 1, **AFTER},
        ),
        ({"controls": {"repeat": False}}, {"plan": 1, **AFTER}),
        ({"fail_on_divergence": True}, {}),
        ({"target": {"resources": {"partition": "npu"}}}, {}),
    ],
)
def test_a_change_runs_exactly_what_depends_on_it(
    done: Project, changes: dict[str, object], expected: dict[str, int]
) -> None:
    done.write(**changes)
    assert done.planned() == expected


@pytest.mark.long
def test_a_change_back_to_numbers_in_the_store_starts_no_run(
    done: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    done.write(seed=2)
    fabricate.store(done.jobs(monkeypatch))
    done.run()
    done.write()
    shutil.rmtree(done.directory / ".snakemake")
    assert done.planned() == {"sides": 2, "compare": 10, "plan": 1, **AFTER}


def test_a_renamed_alignment_file_starts_no_run(done: Project) -> None:
    (done.directory / "a.yaml").rename(done.directory / "renamed.yaml")
    assert done.planned(config="renamed.yaml") == {}


def test_a_fault_is_diverged_and_the_workflow_succeeds_unless_told_otherwise(
    done: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a refining run would train, of which end-to-end tests are
    faulty = {"target": {"environment": {"FAULTY": 1}}, "refine": False}
    config = done.write(name="faulty", **faulty)
    fabricate.store(done.jobs(monkeypatch, config), ["target"], fault="model.layers.0.mlp")
    text = done.run()
    diagnosis = json.loads((done.directory / "results/faulty/diagnosis.json").read_text())
    assert diagnosis["verdict"] == "diverged"
    assert diagnosis["first"]["module"] == "model.layers.0.mlp"
    assert diagnosis["sentence"] in text

    done.write(name="faulty", **faulty, fail_on_divergence=True)
    (done.directory / "results/faulty/verdict.txt").unlink()
    failed = done.snakemake()
    assert failed.returncode == 1
    assert diagnosis["sentence"] in failed.stdout
    assert (done.directory / "results/faulty/report.html").exists()


def test_what_cannot_be_judged_fails_after_the_page_is_written(
    done: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = done.write(name="unlike", target={"environment": {"OTHER": 1}})
    jobs = done.jobs(monkeypatch, config)
    fabricate.store(jobs, ["target"], fault=fabricate.OTHER_WEIGHTS)
    failed = done.snakemake()
    assert failed.returncode == 1
    diagnosis = json.loads((done.directory / "results/unlike/diagnosis.json").read_text())
    assert diagnosis["verdict"] == "not_comparable"
    assert diagnosis["sentence"] in failed.stdout
    assert (done.directory / "results/unlike/report.html").exists()
    assert not (done.directory / "results/unlike/verdict.txt").exists()


def test_a_killed_workflow_is_taken_up_again(done: Project) -> None:
    """SIGKILL while comparing: no half-made result is taken for a whole one."""
    verdict = (done.directory / "results/a/verdict.txt").read_text()
    shutil.rmtree(done.directory / "results")
    running = done.start()
    deadline = time.monotonic() + 120
    while not list((done.directory / "results").rglob("summary.json")):
        assert running.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert list((done.directory / ".snakemake" / "locks").iterdir())

    again = done.align()
    assert again.returncode == 0, again.stdout
    assert "its lock is taken away" in again.stdout
    assert f"ALIGNED  {verdict}" in again.stdout
    assert again.stdout.endswith("\npage: results/a/report.html\n")
    assert done.planned() == {}


def test_align_prints_the_verdict_even_when_there_is_nothing_to_do(done: Project) -> None:
    again = done.align()
    assert again.returncode == 0, again.stdout
    assert "Nothing to be done" in again.stdout
    verdict = (done.directory / "results/a/verdict.txt").read_text()
    assert f"ALIGNED  {verdict}" in again.stdout
    assert again.stdout.endswith("\npage: results/a/report.html\n")


def test_align_refuses_a_wrong_file_before_the_workflow_starts(done: Project) -> None:
    done.write(sede=1)
    failed = done.align()
    assert failed.returncode == 2
    assert failed.stdout.startswith("rlprobe: error: a.yaml: 1 problem\n  sede: no such key")
    assert "snakemake" not in failed.stdout.lower()


def test_the_plan_says_what_the_results_are_of(
    done: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: Jobs = done.jobs(monkeypatch)
    assert json.loads(Path(jobs.plan_file).read_text()) == seal.sealed(jobs.described())


def test_refining_an_aligned_target_ends_with_the_reason(done: Project) -> None:
    """The checkpoint: what there is to run follows from the diagnosis, here nothing."""
    finished = done.snakemake("--nolock", "refine")
    assert finished.returncode == 0, finished.stdout
    refine = done.directory / "results" / "a" / "refine"
    plan = json.loads((refine / "suspects.json").read_text())
    assert plan["suspects"] is None
    assert "the verdict is aligned" in plan["reason"]
    assert [path.name for path in refine.iterdir()] == ["suspects.json"]
