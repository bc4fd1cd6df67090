"""Which names does each kind of device go by, and which devices may a job use?"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlprobe.errors import ConfigError, RunError
from rlprobe.runs import devices


def test_every_kind_of_the_configuration_has_a_row() -> None:
    assert set(devices.DEVICES) == {"cpu", "cuda", "npu"}
    with pytest.raises(ConfigError, match="accepted: cpu, cuda, npu"):
        devices.get("tpu")


def test_collectives_keep_to_the_configured_interface_by_its_exact_name() -> None:
    assert devices.communication("cpu", "ib0", "10.0.0.1") == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert devices.communication("cuda", "ib0", None) == {
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "=ib0",
    }
    npu = devices.communication("npu", "enp1", "10.0.0.1")
    assert npu["HCCL_SOCKET_IFNAME"] == "=enp1"
    assert npu["HCCL_IF_IP"] == "10.0.0.1"
    assert 120 <= int(npu["HCCL_CONNECT_TIMEOUT"]) <= 7200


def test_nothing_is_said_about_interfaces_where_none_is_configured() -> None:
    assert devices.communication("cuda", None, None) == {}


def test_devices_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("davinci11", "davinci2", "davinci_manager", "davinci0"):
        (tmp_path / name).touch()
    found = [Path(node).name for node in devices.device_nodes("npu", tmp_path)]
    assert found == ["davinci0", "davinci2", "davinci11"]
    assert devices.device_nodes("cpu", tmp_path) == []


def visible(
    kind: str = "npu",
    environ: dict[str, str] | None = None,
    requested: int | None = None,
    allocated: str | None = None,
) -> str | None:
    return devices.visible_devices(
        kind, environ or {}, requested=requested, present=8, allocated=allocated
    )


def test_a_whole_node_leaves_every_device_visible() -> None:
    assert visible() is None
    assert visible(requested=8) is None
    assert visible("cpu") is None


def test_what_the_scheduler_or_the_user_named_is_taken() -> None:
    assert visible(requested=4, allocated="0-2,6") == "0,1,2,6"
    assert visible(requested=4, environ={"ASCEND_RT_VISIBLE_DEVICES": "4,5"}) == "4,5"
    assert visible("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, requested=1) == "1"


def test_a_share_of_a_node_that_nobody_names_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"4 of this node's 8 npu.*exclusive.*gres.conf"):
        visible(requested=4)


@pytest.mark.parametrize("text", ["", "a", "1-", "0-3;4", "N/A"])
def test_an_index_list_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="device indices"):
        devices.expand_indices(text)


@pytest.mark.parametrize(
    ("kind", "nodes"), [("npu", ("davinci0", "davinci1")), ("cuda", ("nvidia0",))]
)
def test_a_run_is_refused_where_its_devices_are_not(
    tmp_path: Path, kind: str, nodes: tuple[str, ...]
) -> None:
    with pytest.raises(RunError, match=rf"has none of the 1 .*{tmp_path}/.* matches nothing"):
        devices.require(kind, 1, tmp_path)
    for node in nodes:
        (tmp_path / node).touch()
    devices.require(kind, len(nodes), tmp_path)
    with pytest.raises(RunError, match=rf"has {len(nodes)} of the 8"):
        devices.require(kind, 8, tmp_path)
    devices.require("cpu", 64, tmp_path)


def test_a_gpu_under_wsl_is_one(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()
    devices.require("cuda", 1, tmp_path)
