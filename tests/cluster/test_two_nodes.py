"""Does Ray span the nodes of an allocation, for one run and no longer?

Two slurmd in network namespaces of their own stand for two hosts.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from services import hosts

if TYPE_CHECKING:
    from conftest import Site

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
_PROGRAM = Path(__file__).parent / "programs" / "two_nodes.py"
_BOTH = [["npu01", "eth0"], ["npu02", "eth0"]]


class Program:
    """The program in an allocation of both NPU nodes, as the executor starts a run."""

    def __init__(self, site: Site, name: str, *words: str) -> None:
        self.scratch = site.directory / name
        self.output = site.directory / f"{name}.out"
        batch = site.directory / f"{name}.sh"
        step = f"srun -n1 --nodes=1 {sys.executable} {_PROGRAM} {self.scratch} {' '.join(words)}"
        batch.write_text(f"#!/bin/bash\nenv -u SLURM_NTASKS {step}\n")
        self._site = site
        self.process = subprocess.Popen(
            [
                *("sbatch", "--wait", "--parsable", "--partition=npu", "--gres=npu:1"),
                *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4"),
                *(f"--output={self.output}", "--mem=4000", str(batch)),
            ],
            cwd=site.directory,
            env=site.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def events(self) -> dict[str, dict[str, Any]]:
        if not self.output.exists():
            return {}
        lines = [line for line in self.output.read_text().splitlines() if line.startswith("{")]
        return {event["event"]: event for event in map(json.loads, lines)}

    def await_event(self, name: str, seconds: float = 300) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while name not in self.events():
            assert time.monotonic() < deadline, self.everything()
            ended = self.process.poll() is not None
            if ended and name not in self.events():
                pytest.fail(self.everything())
            time.sleep(0.2)
        return self.events()[name]

    def everything(self) -> str:
        logs = [self.output, *sorted((self.scratch / "logs").glob("*"))]
        return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in logs if p.exists())


@pytest.fixture
def program(site: Site) -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(name: str, *words: str) -> Program:
        started.append(Program(site, name, *words))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(5)
        one.process.kill()
    site.command("scancel", "--user=root")


@pytest.mark.long
def test_two_clusters_on_the_same_two_nodes_never_touch(
    site: Site, program: Callable[..., Program]
) -> None:
    release = site.directory / "release"
    staying = program("staying", "--interface", "eth0", "--hold", str(release))
    staying.await_event("actors")
    # none is named: each node finds its own, from the addresses that Slurm has of them
    leaving = program("leaving")
    assert leaving.await_event("actors")["actors"] == _BOTH
    leaving.await_event("down")
    assert leaving.process.wait(60) == 0
    # The first cluster still answers, on both of its nodes, after the second was stopped.
    release.touch()
    assert staying.await_event("again")["actors"] == _BOTH
    staying.await_event("down")
    assert staying.process.wait(60) == 0
    assert leaving.events()["up"]["address"] != staying.events()["up"]["address"]
    raylets = subprocess.run(
        ["pgrep", "-af", "raylet"], capture_output=True, text=True, check=False
    )
    # Directories of jobs are named after them; rlprobe-local is a run outside of Slurm.
    assert not re.search(r"/rlprobe-[0-9]", raylets.stdout)


def test_a_cluster_with_fewer_nodes_than_asked_for_is_an_error(
    program: Callable[..., Program],
) -> None:
    late = program("late", "--timeout", "2", "--head-only")
    message = late.await_event("error")["message"]
    assert "fewer than 2 nodes joined Ray within 2 s" in message
    assert late.process.wait(60) == 1


@pytest.mark.long
def test_a_node_that_loses_everything_is_named_before_slurm_gives_it_up(
    site: Site, program: Callable[..., Program]
) -> None:
    """As without power: Slurm's daemon is gone too, and Slurm waits for it (SlurmdTimeout)."""
    failed = site.directory / "failed"
    running = program("loses", "--fails", str(failed))
    running.await_event("actors")
    assert site.cluster is not None
    try:
        killed = hosts.kill("npu02")
        assert any(line.startswith("slurmd") for line in killed), killed
        began = time.monotonic()
        failed.touch()
        message = running.await_event("error")["message"]
        named = time.monotonic() - began
        assert re.match(r"node npu02 \(10\.213\.77\.4\) was lost", message), message
        # the job keeps its node until Slurm gives that one up, and is not started again
        assert running.process.wait(400) == 1
        assert named < time.monotonic() - began
        assert running.output.read_text().count('"actors"') == 2, running.everything()
    finally:
        site.cluster.up()
