"""What would the workflow do? Asked of Snakemake before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow import fabricate
from tests.workflow.project import Project

RUNS = {"run_benchmark": 1, "run_target": 1, "run_repeat": 1}
STORED = {"diagnose": 1, "plan": 1, "report": 1, "verdict": 1}
AFTER = {**STORED, "suspects": 1}


def test_a_fresh_clone_runs_everything(project: Project) -> None:
    assert project.planned() == {**RUNS, "sides": 2, "compare": 10, **AFTER}


def test_the_official_table_is_made_beside_ours_where_it_is_wanted(project: Project) -> None:
    project.write(analysis={"official_table": True})
    planned = project.planned()
    own = {job: n for job, n in planned.items() if job.startswith("official")}
    assert own == {"official_table": 5, "official_key_data": 1}, "a job a stage, one for key data"


def test_the_report_profile_leaves_msprobes_own_tables_out(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need torch, which a machine that makes pages may lack."""
    project.write(analysis={"official_table": True, "official_graph": True})
    fabricate.store(project.jobs(monkeypatch))
    assert not [job for job in project.planned(profile="profiles/report") if "official" in job]


def test_collect_runs_the_benchmark_only(project: Project) -> None:
    assert project.planned("collect") == {"collect": 1, "run_benchmark": 1}


def test_align_is_a_target_by_name(project: Project) -> None:
    assert project.planned("align") == {**RUNS, "sides": 2, "compare": 10, **AFTER, "align": 1}


def test_an_imported_benchmark_is_not_run(project: Project) -> None:
    project.write(benchmark={"run": "ab" * 32}, controls={"repeat": False})
    manifest = project.directory / "store" / "runs" / ("ab" * 32) / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}", encoding="utf-8")
    assert project.planned() == {"run_target": 1, "sides": 1, "compare": 5, **AFTER}


def test_an_imported_benchmark_that_is_not_there_is_named(project: Project) -> None:
    project.write(benchmark={"run": "ab" * 32}, controls={"repeat": "cd" * 32})
    done = project.snakemake("--dry-run")
    assert done.returncode == 1
    assert f"benchmark.run: run {'ab' * 32} is not in the store store" in done.stdout
    assert f"controls.repeat: run {'cd' * 32} is not in the store store" in done.stdout
    assert "rlprobe store import BUNDLE --store store" in done.stdout
    assert "MissingInput" not in done.stdout and "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": "one"}, "seed: found 'one' (text); accepted: a whole number"),
        ({"sede": 1}, "sede: no such key"),
        ({"model": {"path": "nowhere"}}, "model.path: nowhere does not exist"),
    ],
)
def test_a_wrong_alignment_stops_the_workflow_with_one_message(
    project: Project, changes: dict[str, object], expected: str
) -> None:
    project.write(**changes)
    done = project.snakemake("--dry-run")
    assert done.returncode == 1
    assert done.stdout.count(expected) == 1
    assert "Traceback" not in done.stdout


def test_a_target_that_cannot_run_here_costs_no_benchmark(project: Project) -> None:
    if list(Path("/dev").glob("davinci[0-9]*")):
        pytest.skip("this machine has an NPU")
    project.write(target={"device": "npu", "precision": "fp32"}, ray=True)
    done = project.snakemake()
    assert done.returncode == 1
    assert "target: device: npu" in done.stdout
    assert "matches nothing" in done.stdout
    assert "benchmark: verl on" not in done.stdout, "nothing was started"
    # collecting the benchmark alone is no business of the target's device
    assert project.planned("collect")["run_benchmark"] == 1


def test_an_alignment_is_changed_in_its_file(project: Project) -> None:
    done = project.snakemake("--dry-run", "--config", "seed=2")
    assert done.returncode == 1
    assert "change the file rather than using --config" in done.stdout


def test_two_alignments_do_not_mix(project: Project) -> None:
    project.write("b.yaml", name="b")
    done = project.snakemake("--configfile", "a.yaml", "b.yaml", "--dry-run")
    assert done.returncode == 1
    assert "an alignment is one file" in done.stdout


def test_lint_is_clean(project: Project) -> None:
    done = project.snakemake("--lint")
    assert done.returncode == 0, done.stdout


def test_snakefmt_is_clean(root: Path) -> None:
    command = [str(Path(sys.executable).with_name("snakefmt")), "--check", "Snakefile", "workflow"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_cluster_profile_works_by_its_bare_name(project: Project, root: Path) -> None:
    (project.directory / "ascend_cluster").symlink_to(root / "ascend_cluster")
    assert project.planned(profile="ascend_cluster") == {**RUNS, "sides": 2, "compare": 10, **AFTER}


def test_the_report_profile_starts_no_training(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = project.snakemake("--dry-run", profile="profiles/report")
    assert refused.returncode == 1
    assert "Missing input files" in refused.stdout
    fabricate.store(project.jobs(monkeypatch))
    assert project.planned(profile="profiles/report") == {"sides": 2, "compare": 10, **STORED}


def test_refining_is_switched_off_in_the_alignment(project: Project) -> None:
    project.write(refine=False)
    assert project.planned() == {**RUNS, "sides": 2, "compare": 10, **STORED}


def test_refining_waits_for_the_diagnosis_to_say_what_is_suspect(project: Project) -> None:
    planned = project.planned("refine")
    expected = {**RUNS, "sides": 2, "compare": 10, "diagnose": 1, "plan": 1}
    assert planned == {**expected, "suspects": 1, "refine": 1}
