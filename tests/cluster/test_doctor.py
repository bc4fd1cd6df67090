"""Does the doctor find on a real Slurm what would fail after hours in the queue?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Site

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def doctor(site: Site, config: str, *words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    done = site.command(
        "rlprobe", "doctor", "--config", config, "--json", "doctor.json", "-q", *words
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for item in json.loads((site.directory / "doctor.json").read_text())["items"]:
        found.setdefault(item["name"], []).append(item)
    return done.returncode, found


def test_what_the_cluster_does_not_have_is_named_with_what_it_has(site: Site) -> None:
    config = site.write(
        "wrong",
        benchmark={"resources": {"partition": "gpus"}},
        target={
            "resources": {
                "partition": "npu",
                "gres": "npu:16",
                "constraint": "ascend950",
                "cpus": 65,
                "time": "3d",
            }
        },
        analysis={"image": "images/none.sif", "resources": {"partition": "cpu"}},
    )
    status, found = doctor(site, config)
    assert status == 1

    def failed(name: str) -> dict[str, Any]:
        (item,) = found[name]
        assert item["state"] == "fail", item
        return item

    assert failed("benchmark.resources.partition")["action"] == "use one of cpu, gpu, npu"
    assert "offers npu:8" in failed("target.resources.gres")["found"]
    assert "ascend910b" in failed("target.resources.constraint")["action"]
    assert failed("target.resources.cpus")["found"] == "65 asked for, nodes have 64"
    assert "1440 min" in failed("target.resources.time")["found"]
    assert "images/none.sif does not exist" in failed("analysis.image")["found"]
    assert found["analysis.resources.partition"][0]["state"] == "ok"
    assert "squeue" in found["slurm accounting"][0]["found"]


def test_from_the_nodes_it_sees_the_store_and_starts_the_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = site.write(
        "right",
        benchmark={"resources": {"partition": "gpu", "gres": "gpu:1"}},
        target={"resources": {"partition": "npu", "nodes": 2, "gres": "npu:8"}, "world_size": 2},
    )
    status, found = doctor(site, config, "--on-cluster", "--wait", "60")
    assert status == 0, found
    nodes = {item["node"] for item in found["shared storage"]}
    assert nodes == {"gpu01", "npu01", "npu02"}
    assert {item["state"] for item in found["store hard links"]} == {"ok"}
    assert {item["found"] for item in found["target import verl"]} == {"0.9.1"}
    for question in ("import ray", "import msprobe", "product", "collective"):
        assert {item["state"] for item in found[f"target {question}"]} == {"ok"}, found
    assert not list(Path(site.directory).glob(".rlprobe-doctor-*"))


def test_a_job_that_cannot_start_is_a_failure_and_no_endless_wait(site: Site) -> None:
    config = site.write(
        "busy",
        benchmark={"resources": {"partition": "gpu", "gres": "gpu:8"}},
    )
    site.command("scontrol", "update", "nodename=gpu01", "state=drain", "reason=test")
    try:
        status, found = doctor(site, config, "--on-cluster", "--wait", "3")
    finally:
        site.command("scontrol", "update", "nodename=gpu01", "state=resume")
    assert status == 1
    assert found["benchmark.resources.nodes"][0]["state"] == "fail"
    assert found["benchmark job"][0]["state"] == "fail"
