"""Does a run's Ray start on every node, and is a node that does not join, or is gone, said?

The programs are stand-ins: tests/cluster starts real nodes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlprobe.config import ContainerSection
from rlprobe.errors import RunError
from rlprobe.runs import raycluster, slurm
from rlprobe.runs.raycluster import Cluster, Node, Plan

pytestmark = pytest.mark.slow

NODES = [
    Node("a", "10.0.0.1", {"head": 6379, "client": 10001, "agent": 52365}),
    Node("b", "10.0.0.2", {"head": 6380, "client": 10002, "agent": 52366}),
]
RAY, JOINED = "ray.scripts.scripts", "rlprobe.frameworks.raynodes"


class Started:
    """What was to be started, in order; what runs instead is a line of Python for each module."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []
        self.where: list[dict[str, Any]] = []
        self.instead = {RAY: "import time; time.sleep(60)", JOINED: ""}

    def wrap(self, argv: list[str], env: dict[str, str], *_: Any, **where: Any) -> list[str]:
        assert argv[:2] == [sys.executable, "-m"]
        self.commands.append(argv[2:])
        self.environments.append(dict(env))
        self.where.append(where)
        return [sys.executable, "-c", self.instead[argv[2]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr("rlprobe.runs.raycluster.containers.wrap", found.wrap)
    monkeypatch.setattr("rlprobe.runs.raycluster.slurm.cancel_steps", lambda *_: None)
    return found


@pytest.fixture
def cluster(tmp_path: Path, started: Started) -> Iterator[Cluster]:
    plan = Plan(
        container=ContainerSection(runtime="none"), device="cpu", env={"OWN": "1"}, declared={},
        binds=(), job_id="7", scratch=tmp_path, resources={"GPU": 2, "CPU": 12}, timeout_s=9,
    )  # fmt: skip
    found = Cluster(plan, NODES)
    for node in NODES:
        found.start(node)
    yield found
    found.stop()


def test_the_first_node_is_the_head_and_the_others_join_it(
    cluster: Cluster, started: Started
) -> None:
    cluster.wait()
    head, other, joined = started.commands
    assert head[:2] == other[:2] == [RAY, "start"] and joined == [JOINED, "2", "--timeout=9"]
    assert "--head" in head and "--port=6379" in head and "--num-gpus=2" in head
    assert "--head" not in other and "--address=10.0.0.1:6379" in other
    assert [where.get("node") for where in started.where] == ["a", "b", None]
    # "ray start" would take it for where to join; what asks who has joined needs it
    assert ["RAY_ADDRESS" in env for env in started.environments] == [False, False, True]
    assert all(env["OWN"] == "1" for env in started.environments)


def test_nodes_that_do_not_join_in_time_are_said_with_the_log(
    cluster: Cluster, started: Started
) -> None:
    started.instead[JOINED] = "import sys; print('only one came'); sys.exit(1)"
    with pytest.raises(RunError, match="fewer than 2 nodes joined Ray within 9 s") as error:
        cluster.wait()
    assert "only one came" in str(error.value)


def test_a_node_that_ends_is_said_with_its_log(tmp_path: Path, started: Started) -> None:
    started.instead |= {RAY: "print('no such device')", JOINED: "import time; time.sleep(60)"}
    plan = Plan(
        container=ContainerSection(runtime="none"), device="cpu", env={}, declared={}, binds=(),
        job_id="7", scratch=tmp_path, resources={},
    )  # fmt: skip
    found = Cluster(plan, NODES[:1])
    found.start(NODES[0])
    with pytest.raises(RunError, match=r"Ray on node a ended with exit status 0(?s:.*)no such"):
        found.wait()


def test_a_node_that_ends_after_the_framework_failed_is_named(
    tmp_path: Path, started: Started
) -> None:
    """Ray tells the framework of a lost node before the node's own step ends."""
    started.instead[RAY] = "import sys, time; time.sleep(2); sys.exit('raylet died')"
    plan = Plan(
        container=ContainerSection(runtime="none"), device="cpu", env={}, declared={}, binds=(),
        job_id="7", scratch=tmp_path, resources={},
    )  # fmt: skip
    found = Cluster(plan, NODES[1:])
    found.start(NODES[1])
    found.check()
    found.blame(0.1)
    with pytest.raises(RunError, match=r"Ray on node b ended with exit status 1(?s:.*)raylet died"):
        found.blame(30)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("print('lost 10.0.0.2')", "b"),
        ("print('Connecting to Ray'); print('lost 10.0.0.1')", "a"),
        ("print('lost 10.9.9.9')", None),
        ("", None),
        ("import sys; sys.exit('no GCS')", None),
    ],
)
def test_a_node_that_ray_alone_knows_to_be_gone_is_named(
    cluster: Cluster, started: Started, answer: str, named: str | None
) -> None:
    """Slurm waits for minutes for a machine without power: its step has not ended."""
    started.instead[JOINED] = answer
    if named is None:
        cluster.blame(0.1)
    else:
        with pytest.raises(RunError, match=rf"node {named} \(10\.0\.0\.\d\) was lost"):
            cluster.blame(0.1)
    assert started.commands[-1] == [JOINED, "--lost", "--timeout=0.1"]


def test_a_node_that_ray_gives_up_later_is_waited_for(cluster: Cluster, started: Started) -> None:
    """The framework hears of a broken connection before Ray misses the node's answers."""
    started.instead[JOINED] = "import time; time.sleep(1); print('lost 10.0.0.2')"
    began = time.monotonic()
    with pytest.raises(RunError, match=r"node b \(10\.0\.0\.2\) was lost"):
        cluster.blame(30)
    assert time.monotonic() - began < 20, "what is known is said at once"


def test_a_ray_that_does_not_answer_is_not_waited_for(
    cluster: Cluster, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlprobe.runs.raycluster._ANSWER_S", 0.5)
    started.instead[JOINED] = "import time; time.sleep(60)"
    began = time.monotonic()
    cluster.blame(0.1)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("gone", [{"b"}, {"a", "b"}])
def test_a_node_that_cannot_be_cleaned_is_said_and_changes_nothing_else(
    gone: set[str],
    cluster: Cluster,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a run ended with is told, not that a dead node is silent; the others are cleaned."""
    cleaned = []

    def on(names: list[str], *arguments: str) -> str:
        if arguments[0] == "prepare":
            lines = [
                {"node": n.name, "address": n.address, "ports": n.ports, "interface": "eth0"}
                for n in NODES
                if n.name in names
            ]
            return "\n".join(map(json.dumps, lines))
        if gone & set(names):
            raise RunError(f"{names}: no answer")
        cleaned.extend(names)
        return ""

    monkeypatch.setattr(raycluster, "_on_every_node", on)
    monkeypatch.setattr(raycluster, "_await_head", lambda _: None)
    monkeypatch.setattr(slurm, "node_address", lambda name: name)
    monkeypatch.setattr(slurm, "allocated_nodes", lambda _: ["a", "b"])
    with raycluster.running(cluster._plan, 2) as made:
        assert made.address == "10.0.0.1:6379"
    assert set(cleaned) == {"a", "b"} - gone
    assert {r.getMessage()[0] for r in caplog.records if r.levelname == "WARNING"} == gone
    with pytest.raises(RunError, match="Ray on node b ended"), raycluster.running(cluster._plan, 2):
        raise RunError("Ray on node b ended with exit status 9")
    # of one that is known to be lost nothing is asked, which would take a minute
    cleaned.clear()
    lost = pytest.raises(RunError, match="node b was lost")
    with lost, raycluster.running(cluster._plan, 2) as made:
        made.gone.add("b")
        raise RunError("node b was lost")
    assert set(cleaned) == {"a"} - gone
