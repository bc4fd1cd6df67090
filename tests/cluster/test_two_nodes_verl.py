"""Does real verl train over two nodes, is it replayed there and judged, and is a lost node named?

Two slurmd in network namespaces stand for the hosts. Their interfaces have different names, as on
machines that were bought in different years, and the alignment names none.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars
import pytest
from services import hosts

if TYPE_CHECKING:
    from conftest import Site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    # three starts of verl under Ray and one that is killed, eighteen minutes on two busy cores:
    # make cluster
    pytest.mark.long,
    pytest.mark.timeout(3000),
]
_SECOND = "npu02"
_STAGES = {
    "reference_compute_log_prob",
    "actor_compute_log_prob",
    "critic_compute_values",
    "critic_update",
    "actor_update",
}
_OVER_TWO: dict[str, Any] = {
    "world_size": 2,
    "resources": {
        "partition": "npu", "gres": "npu:1", "nodes": 2, "cpus": 2, "memory": "6G", "time": "20m",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, site_at: Callable[[Path], Site]
) -> Iterator[Site]:
    hosts.rename(_SECOND, hosts.INTERFACE, "enp1s0")
    made = site_at(tmp_path_factory.mktemp("two-nodes"))
    yield made
    assert made.cluster is not None
    made.command("scancel", "--user=root")
    hosts.rename(_SECOND, "enp1s0", hosts.INTERFACE)
    made.cluster.up()


def _config(site: Site, name: str, **changes: Any) -> str:
    return site.write(
        name,
        benchmark=_OVER_TWO,
        target=_OVER_TWO,
        analysis={
            "official_table": False,
            "resources": {"partition": "cpu", "cpus": 1, "memory": "2G", "time": "10m"},
        },
        **changes,
    )


@pytest.fixture(scope="module")
def aligned(site: Site) -> str:
    """Benchmark, repeat and target, one after the other: three cold starts over two nodes."""
    config = _config(site, "over-two-nodes", steps={"total": 1, "start": 0, "end": 0})
    runs = ("run_benchmark", "run_repeat", "run_target")
    done = site.command(*site.snakemake(config, "--retries", "0", "--jobs", "1", *runs))
    logs = sorted((site.directory / "logs/over-two-nodes").glob("*.log"))
    ends = "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in logs)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{ends}"
    # the comparisons need no second node; test_slurm_alignment has them as jobs
    done = site.command("snakemake", "--profile", "profiles/local", "--configfile", config)
    assert done.returncode == 0, done.stdout[-6000:]
    return config


def test_a_step_over_two_nodes_is_collected_replayed_and_judged(site: Site, aligned: str) -> None:
    results = site.directory / "results/over-two-nodes"
    diagnosis = json.loads((results / "diagnosis.json").read_text())
    assert diagnosis["verdict"] == "aligned", diagnosis["sentence"]
    judged = {stage["stage"] for stage in diagnosis["stages"] if stage["records"]}
    assert judged >= _STAGES
    for stage in _STAGES:
        (extent,) = diagnosis["extent"][stage].values()
        assert extent["judged"] > 0, stage
    assert (results / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("role", ["benchmark", "repeat", "target"])
def test_each_run_had_a_rank_on_each_node(site: Site, aligned: str, role: str) -> None:
    run = site.directory / "store/runs" / site.key(aligned, role)
    for stage in _STAGES:
        ranks = polars.read_parquet(run / f"records/{stage}.parquet", columns=["rank"])["rank"]
        assert set(ranks.unique()) == {0, 1}, stage
    log = (site.directory / f"logs/over-two-nodes/{role}.log").read_text()
    # Ray says of what its workers write from which node it comes, where that is not the driver's
    workers = set(re.findall(r"\(\w+ pid=\d+, ip=([\d.]+)\)", log))
    assert workers == {hosts.address(2)}, workers


def test_the_repeat_over_two_nodes_is_bitwise_the_benchmark(site: Site, aligned: str) -> None:
    found = sorted(
        (site.directory / "results/over-two-nodes/compare/repeat").glob("*/summary.json")
    )
    assert found
    for path in found:
        summary = json.loads(path.read_text())
        assert summary["identical"] + summary["no_difference_seen"] == summary["compared"] > 0


def test_nothing_of_the_runs_is_left_on_the_nodes(site: Site, aligned: str) -> None:
    assert not list((site.directory / "store/scratch").glob("*"))
    jobs = list((site.directory / ".snakemake/slurm_logs").glob("rule_run_*/**/*.log"))
    assert len(jobs) == 3
    for path in jobs:
        # nothing was said of directories or steps that could not be cleaned up; that its own step
        # is on one of the nodes is srun's
        said = [line for line in path.read_text().lower().splitlines() if "warning" in line]
        assert all("setting nnodes to 1" in line for line in said), said
    for name in ("npu01", _SECOND):
        left = hosts.processes(name).values()
        assert not [line for line in left if "ray" in line.split("/")[-1] or "verl" in line]


def test_a_node_whose_ray_dies_in_training_ends_the_run_with_its_name(site: Site) -> None:
    name = "loses-ray"
    config = _config(site, name, seed=7, steps={"total": 40, "start": 0, "end": 0})
    key = site.key(config, "benchmark")
    words = site.snakemake(config, "--retries", "0", "run_benchmark")
    said = site.directory / f"{name}.out"
    with said.open("w") as output:
        running = subprocess.Popen(
            words, cwd=site.directory, env=site.environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _await_training(site, key, running, said)
        assert hosts.kill(_SECOND, lambda line: line.split(" ")[0].endswith("/raylet"))
        began = time.monotonic()
        assert running.wait(600) == 1
        took = time.monotonic() - began
    finally:
        running.terminate()
        running.wait(60)
        site.command("scancel", "--user=root")
        assert site.cluster is not None
        site.cluster.up()
    # what the job says itself, which is where Snakemake points to
    jobs = (site.directory / ".snakemake/slurm_logs/rule_run_benchmark").rglob("*.log")
    log = max(jobs, key=lambda path: path.stat().st_mtime).read_text()
    assert re.search(rf"rlprobe: error: .*node {_SECOND}\b", log), log
    assert took < 300
    assert not (site.directory / "store/runs" / key / "manifest.json").exists()


def _await_training(site: Site, key: str, running: subprocess.Popen[bytes], said: Path) -> None:
    """Until the captured step is over; the many that follow it are trained on both nodes."""
    deadline = time.monotonic() + 600
    while True:
        found = list((site.directory / "store/scratch").glob(f"{key[:16]}-*/side/progress.jsonl"))
        events = [json.loads(line) for path in found for line in path.read_text().splitlines()]
        if any(e["stage"] == "actor_update" and e["seconds"] is not None for e in events):
            return
        assert running.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.3)
