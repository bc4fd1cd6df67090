"""Does an alignment run on a real Slurm, each job where it belongs and in its image?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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


def test_the_runs_really_happened_in_the_image(aligned: Aligned, sifs: dict[str, Path]) -> None:
    key = aligned.site.key(aligned.config, "benchmark")
    run = aligned.store / "runs" / key
    environment = json.loads((run / "environment.json").read_text())
    # Debian's Python of the image, not the one that runs these tests.
    assert "3.11.2" in json.dumps(environment)


def test_msprobe_s_table_was_written_in_the_image_with_torch(aligned: Aligned) -> None:
    tables = sorted((aligned.results / "compare/target").glob("*/official.csv"))
    assert len(tables) == 5


def test_a_second_call_starts_no_job(aligned: Aligned) -> None:
    done = aligned.site.command(*aligned.site.snakemake(aligned.config))
    assert done.returncode == 0, done.stdout
    assert "Nothing to be done" in done.stdout


def test_the_repeat_in_the_image_is_bitwise_the_benchmark(aligned: Aligned) -> None:
    summaries = list((aligned.results / "compare/repeat").glob("*/summary.json"))
    assert summaries
    for path in summaries:
        summary = json.loads(path.read_text())
        alike = summary["identical"] + summary["no_difference_seen"]
        assert alike == summary["compared"] > 0, path


@pytest.mark.long
def test_locally_in_the_same_image_the_numbers_are_the_same(
    aligned: Aligned, tmp_path: Path
) -> None:
    """One benchmark run without Slurm has the key and the records of the one on the cluster.

    Of a target's run test_two_sites shows the same every time.
    """
    import polars

    done = aligned.site.command(
        *("rlprobe", "run", "--config", aligned.config, "--role", "benchmark"),
        *("--store", str(tmp_path / "store")),
    )
    assert done.returncode == 0, done.stdout
    key = aligned.site.key(aligned.config, "benchmark")
    stages = sorted((aligned.store / "runs" / key / "records").glob("*.parquet"))
    assert len(stages) == 6
    for there in stages:
        here = tmp_path / "store" / "runs" / key / "records" / there.name
        if there.stem == "actor_generate_sequences":
            # requests are answered, and so their calls are counted, in the order they arrive
            numbers = ["step", "rank", "mean", "norm"]
            one, other = (
                polars.read_parquet(path, columns=numbers).sort(numbers) for path in (here, there)
            )
        else:
            columns = ["step", "rank", "order", "name", "mean", "norm", "digest"]
            one, other = (polars.read_parquet(path, columns=columns) for path in (here, there))
        assert one.equals(other), there.name


def test_a_failing_job_is_reported_with_its_log(site: Site) -> None:
    config = site.write(
        "fails",
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
