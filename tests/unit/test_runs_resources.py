"""Does a job ask Slurm for what its run needs, and is a request that cannot work refused?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.config import ResourcesSection, TargetSection
from rlprobe.errors import ConfigError
from rlprobe.runs import devices, resources, slurm


def side(device: str = "npu", world_size: int = 8, **asked: Any) -> TargetSection:
    asked = {"partition": "npu", **asked}
    return TargetSection(
        device=device,  # type: ignore[arg-type]
        world_size=world_size,
        resources=ResourcesSection(**asked),
    )


def test_a_laptop_asks_for_nothing() -> None:
    assert resources.snakemake(ResourcesSection()) == {}


def test_every_key_reaches_the_executor() -> None:
    asked = ResourcesSection(
        partition="npu",
        gres="npu:ascend910b:8",
        cpus=96,
        memory="512G",
        time="4h",
        account="lab",
        constraint="ascend910b",
        qos="high",
        extra="--reservation=x",
        exclusive=True,
    )
    assert resources.snakemake(asked) == {
        "slurm_partition": "npu",
        "gres": "npu:ascend910b:8",
        "cpus_per_task": 96,
        "mem_mb": 512 * 1024,
        "runtime": 240,
        "slurm_account": "lab",
        "constraint": "ascend910b",
        "qos": "high",
        "slurm_extra": "--reservation=x --exclusive",
    }


def test_several_nodes_get_a_task_each_unless_the_executor_would_make_it_a_task_per_gpu() -> None:
    npu = resources.snakemake(ResourcesSection(gres="npu:8", nodes=2))
    assert (npu["nodes"], npu["tasks"]) == (2, 2)
    gpu = resources.snakemake(ResourcesSection(gres="gpu:8", nodes=2))
    assert gpu["nodes"] == 2
    assert "tasks" not in gpu


def test_a_site_without_a_gres_asks_for_whole_nodes() -> None:
    resources.check(side(gres=None, exclusive=True), "target")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (side(gres=None), r"target.resources.gres: found null on partition npu.*npu:8"),
        (side("cuda", gres=None), r"accepted: gres \(as gpu:8\)"),
        (side(gres="npu:4"), r"found npu:4; accepted: at least 8"),
        (side(world_size=16, gres="npu:8"), r"at least 16 devices per node"),
        (side(world_size=9, nodes=2, gres="npu:8"), r"nodes: found 2; accepted: a divisor"),
    ],
)
def test_a_request_that_cannot_work_is_refused_by_key(section: TargetSection, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resources.check(section, "target")


def test_requests_that_work_pass() -> None:
    resources.check(side(world_size=16, nodes=2, gres="npu:8"), "target")
    resources.check(side("cpu", partition="gpu"), "target")
    resources.check(side("cuda", partition=None), "benchmark")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with eight NPUs, in a job whose devices Slurm can tell."""
    for index in range(8):
        (tmp_path / f"davinci{index}").touch()
    row = devices.device_nodes
    monkeypatch.setattr(devices, "device_nodes", lambda kind: row(kind, tmp_path))
    monkeypatch.setattr(slurm, "allocated_devices", lambda name, environ: {"npu": "4-7"}[name])


def test_a_share_of_a_node_sees_only_its_own_devices(node: None) -> None:
    asked = ResourcesSection(gres="npu:ascend910b:4")
    job = {"SLURM_JOB_ID": "7"}
    assert resources.visible("npu", asked, job) == {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}


def test_whole_nodes_and_laptops_see_every_device(node: None) -> None:
    whole = ResourcesSection(gres=None, exclusive=True)
    assert resources.visible("npu", whole, {"SLURM_JOB_ID": "7"}) == {}
    assert resources.visible("npu", ResourcesSection(gres="npu:4"), {}) == {}
    assert resources.visible("cpu", ResourcesSection(gres="npu:4"), {"SLURM_JOB_ID": "7"}) == {}


def test_two_nodes_are_never_joined_by_the_loopback() -> None:
    with pytest.raises(ConfigError, match=r"interface: found lo for 2 nodes"):
        resources.check(side("cpu", 2, nodes=2, interface="lo"), "target")
    resources.check(side("cpu", 2, nodes=2, interface="eth0"), "target")
    resources.check(side("cpu", 1, interface="lo"), "target")


def test_each_nodes_own_interface_reaches_its_processes(tmp_path: Path) -> None:
    """Nodes that name theirs differently, with nothing configured, and lo in the caller's shell."""
    from rlprobe.config import ContainerSection
    from rlprobe.runs.raycluster import Cluster, Node, Plan

    nodes = [Node("a", "10.0.0.1", {"head": 1}, "ens1f0"), Node("b", "10.0.0.2", {}, "enp2")]
    plan = Plan(ContainerSection(), "npu", {"GLOO_SOCKET_IFNAME": "lo"}, {}, (), "j", tmp_path, {})
    for node in nodes:
        found = Cluster(plan, nodes).environment(node)
        assert found["GLOO_SOCKET_IFNAME"] == node.interface
        assert found["HCCL_SOCKET_IFNAME"] == f"={node.interface}"
        assert found["HCCL_IF_IP"] == node.address
    chosen = Plan(
        ContainerSection(), "cpu", {}, {"GLOO_SOCKET_IFNAME": "bond0"}, (), "j", tmp_path, {}
    )
    assert Cluster(chosen, nodes).environment(nodes[1])["GLOO_SOCKET_IFNAME"] == "bond0"
