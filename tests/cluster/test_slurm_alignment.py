"""Does an alignment run on a real Slurm, each job where it belongs?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.leftovers import processes_of, within

if TYPE_CHECKING:
    from conftest import Aligned, Site

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(2400)]


def fields(job: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in job.split() if "=" in word)


def rule_of(job: str) -> str:
    """The rule, which the executor writes into the job's comment."""
    found = re.search(r"Comment=(?:rule_)?(\S+)", job)
    return found.group(1) if found else ""


def test_the_verdict_is_there_and_the_page(aligned: Aligned) -> None:
    diagnosis = json.loads((aligned.results / "diagnosis.json").read_text())
    assert diagnosis["verdict"] == "aligned", diagnosis["sentence"]
    assert (aligned.results / "report.html").stat().st_size > 10_000


def test_each_run_was_a_job_on_its_partition_with_its_devices(aligned: Aligned) -> None:
    # what has no rule is another test's
    asked = {rule_of(job): fields(job) for job in aligned.jobs if rule_of(job)}
    benchmark, target = asked["run_benchmark"], asked["run_target"]
    assert benchmark["Partition"] == "gpu"
    assert "gpu:1" in benchmark["TresPerNode"]
    assert benchmark["Features"] == "h200"
    assert target["Partition"] == "npu"
    assert "npu:8" in target["TresPerNode"]
    assert {job["Partition"] for rule, job in asked.items() if not rule.startswith("run_")} == {
        "cpu"
    }
    assert {job["JobState"] for job in asked.values()} == {"COMPLETED"}


def test_everything_after_the_runs_was_in_its_image(aligned: Aligned) -> None:
    """As each job's own Snakemake says; the runs of this alignment use the nodes' environment."""
    logs = aligned.site.directory / ".snakemake/slurm_logs"
    entered = {
        directory.name.removeprefix("rule_"): {
            "/compare-" in line
            for log in directory.rglob("*.log")
            for line in log.read_text().splitlines()
            if line.startswith("Activating singularity image")
        }
        for directory in logs.iterdir()
    }
    runs = {"run_benchmark", "run_repeat", "run_target"}
    assert {rule for rule, images in entered.items() if not images} == runs
    assert {"compare", "diagnose", "report"} <= entered.keys()
    assert all(images == {True} for rule, images in entered.items() if rule not in runs)


def test_a_second_call_starts_no_job(aligned: Aligned) -> None:
    done = aligned.site.command(*aligned.site.snakemake(aligned.config))
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in done.stdout


def test_the_repeat_is_bitwise_the_benchmark(aligned: Aligned) -> None:
    aligned.assert_the_repeat_is_bitwise_the_benchmark()


def test_nothing_of_a_run_is_left_on_its_node(aligned: Aligned) -> None:
    """No process of Ray or of a worker, and no directory of a job."""
    jobs = [fields(job) for job in aligned.jobs if rule_of(job)]
    within(60, lambda: not processes_of(aligned.store))
    assert jobs
    assert [left for job in jobs for left in Path("/tmp").glob(f"rlprobe-{job['JobId']}.*")] == []


def test_a_failing_job_is_reported_with_its_log(site: Site) -> None:
    config = site.write(
        "fails",
        ray=False,
        # verl itself refuses it, once it has started
        overrides=[*site.raw["overrides"], "actor_rollout_ref.actor.ppo_mini_batch_size=64"],
        analysis={"official_table": False, "resources": {"partition": "cpu"}},
        benchmark={"resources": {"partition": "gpu", "gres": "gpu:1", "memory": "4G"}},
        target={"resources": {"partition": "npu", "gres": "npu:1", "memory": "4G"}},
    )
    done = site.command(*site.snakemake(config, "--retries", "0"))
    assert done.returncode == 1
    assert "run_benchmark" in done.stdout
    assert "logs/fails/benchmark.log" in done.stdout
    assert "ppo_mini_batch_size" in (site.directory / "logs/fails/benchmark.log").read_text()
    within(60, lambda: not processes_of(site.directory / "store"))
