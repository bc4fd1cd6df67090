"""Does a node find its own address, and refuse one on which Ray would never join?"""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from rlprobe.errors import RunError
from rlprobe.runs import node, nodelocal


def test_an_interface_has_its_address() -> None:
    assert node.interface_address("lo") == "127.0.0.1"


def test_a_wrong_interface_is_named_with_those_there_are() -> None:
    with pytest.raises(RunError, match=r"'ib9'; it has: .*lo"):
        node.interface_address("ib9")


def test_a_peer_on_the_loopback_is_refused() -> None:
    with pytest.raises(RunError, match=r"loopback; .*resources.interface"):
        node.address_towards("localhost")


def test_an_interface_is_found_by_its_address() -> None:
    assert node.interface_of("127.0.0.1") == "lo"
    assert node.interface_of("192.0.2.77") is None


def test_ports_are_free_and_different() -> None:
    ports = node.free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("", port))


def test_prepare_makes_directories_and_describes_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(nodelocal.BASE_ENV, str(tmp_path))
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert node.main(["prepare", "12.1", "--interface", "lo"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["node"] == "n7"
    assert described["address"] == "127.0.0.1"
    assert described["interface"] == "lo"
    assert set(described["ports"]) == set(node.PORTS)
    assert nodelocal.of_job("12.1").tmp.is_dir()
    assert node.main(["remove", "12.1"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert node.main(["prepare", "../x", "--interface", "lo"]) == 2
    assert capsys.readouterr().err.startswith("rlprobe: error: job name")
