"""A Ray cluster over the nodes of one allocation, for one run and no longer.

``ray symmetric-run`` does not serve: it cannot call ``srun`` from inside an image, trusts the
loser of a race to be a worker, and ends in ``ray stop``, which kills every Ray of the user on the
node. Here each node gets one step, ``srun … {container} ray start --block``, with ports and a
temporary directory of its own; ending exactly these steps ends exactly this cluster.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlprobe.config import ContainerSection
from rlprobe.errors import RunError
from rlprobe.frameworks.raynodes import LOST
from rlprobe.runs import containers, devices, nodelocal, slurm
from rlprobe.runs.follow import SILENCE_S
from rlprobe.runs.process import end_with_parent

_log = logging.getLogger("rlprobe")
_GRACE_S = 15.0
_TAIL_LINES = 15
#: ``ray start --block`` looks after its processes every second, and Slurm tells of a step's end
#: then; where Slurm's daemon is gone as well, Ray misses five answers, three seconds apart.
_LATE_S = 30.0
#: Longest time besides for Ray to say which nodes it lost: it attaches to the cluster first.
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Node:
    """One node of the cluster, as it described itself."""

    name: str
    address: str
    ports: dict[str, int]
    #: The one that has the address: nodes may name theirs differently.
    interface: str | None = None


@dataclass(frozen=True)
class _Step:
    node: Node
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Plan:
    """What the nodes of one run's cluster have in common."""

    container: ContainerSection
    device: str
    #: Environment of the run; Ray's workers inherit it from their node.
    env: Mapping[str, str]
    #: Those of its variables that the alignment declares: they win over what is found out here,
    #: because a site may know its network better.
    declared: Mapping[str, str]
    binds: tuple[str, ...]
    job_id: str
    scratch: Path
    #: Ray's resources per node, as {"GPU": 8, "CPU": 64}.
    resources: Mapping[str, float]
    interface: str | None = None
    #: Longest time from the first ``srun`` until every node has joined.
    timeout_s: float = 600.0

    @property
    def step_name(self) -> str:
        """Name of every step of this cluster in Slurm."""
        return f"rlprobe-ray-{self.job_id}"

    @property
    def token(self) -> Path:
        """The file that holds the cluster's secret; every node of the run sees it."""
        return self.scratch / "ray-token"

    @property
    def python(self) -> str:
        """The interpreter that has Ray: the image's, or the one that runs rlprobe."""
        return sys.executable if self.container.runtime == "none" else "python"


class Cluster:
    """A running cluster; made by :func:`running`."""

    def __init__(self, plan: Plan, nodes: Sequence[Node]) -> None:
        self._plan = plan
        self._steps: list[_Step] = []
        self.nodes = tuple(nodes)
        #: Names of nodes that are known to be gone: nothing there is waited for.
        self.gone: set[str] = set()

    @property
    def address(self) -> str:
        """The head's, as RAY_ADDRESS takes it."""
        return f"{self.nodes[0].address}:{self.nodes[0].ports['head']}"

    def environment(self, node: Node | None = None) -> dict[str, str]:
        """Variables of processes on a node of the cluster, by default on the head."""
        node = node or self.nodes[0]
        interface = self._plan.interface or node.interface
        network = devices.communication(self._plan.device, interface, node.address)
        return {
            **self._plan.env,
            **network,
            "RAY_ADDRESS": self.address,
            # Newer Ray lets nobody in without the cluster's token. A file, because a command line
            # can be read by every user of the node.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._plan.token),
            # A worker whose head is gone would linger for a minute.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
            **self._plan.declared,
        }

    def check(self) -> None:
        """Raise when a node is gone; the framework alone would wait for it forever.

        Raises:
            RunError: with the end of that node's log.
        """
        for step in self._steps:
            status = step.process.poll()
            if status is not None:
                raise RunError(
                    f"Ray on node {step.node.name} ended with exit status {status}; its log is "
                    f"{step.log} and ends with\n{_tail(step.log)}"
                )

    def blame(self, within_s: float = _LATE_S) -> None:
        """:meth:`check` for a while, once the framework has failed, and ask Ray as well.

        A lost node's own step ends a little later than the framework; where the whole machine is
        gone, Slurm waits for it for minutes, and Ray hears of it after some seconds.

        Raises:
            RunError: a node is gone, which is why it failed.
        """
        _log.info("the framework failed; looking for %g s whether a node was lost", within_s)
        gone = self._lost(within_s)
        self.gone.update(node.name for node in gone)
        if gone:
            node, log = gone[0], self._log(gone[0])
            raise RunError(
                f"node {node.name} ({node.address}) was lost: Ray hears nothing of it any more; "
                f"its log is {log} and ends with\n{_tail(log)}"
            )

    def _lost(self, within_s: float) -> list[Node]:
        """Nodes that Ray loses until then; none where it does not answer.

        Raises:
            RunError: a node's step ended meanwhile.
        """
        log = self._plan.scratch / "logs" / "ray-lost.log"
        began = time.monotonic()
        process = self._python(
            ["-m", "rlprobe.frameworks.raynodes", "--lost", f"--timeout={within_s:g}"],
            self.environment(),
            log,
        )
        try:
            while process.poll() is None or time.monotonic() < began + within_s:
                self.check()
                if process.poll() == 0 and self._named(log):
                    break
                if time.monotonic() > began + within_s + _ANSWER_S:
                    _log.warning("Ray did not say which nodes it lost")
                    break
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        self.check()
        return self._named(log)

    def _named(self, log: Path) -> list[Node]:
        """Nodes that a log of ``raynodes --lost`` names."""
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        gone = {line.removeprefix(LOST).strip() for line in lines if line.startswith(LOST)}
        return [node for node in self.nodes if node.address in gone]

    def _log(self, node: Node) -> Path:
        return self._plan.scratch / "logs" / f"ray-{node.name}.log"

    def start(self, node: Node) -> None:
        """Start Ray on one node; returns at once."""
        head = not self._steps
        log = self._log(node)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = self.environment(node)
        environment.pop("RAY_ADDRESS")  # "ray start" would take it for where to join
        command = ["-m", "ray.scripts.scripts", *self._ray_start(node, head)]
        process = self._python(
            command, environment, log, node=node.name, step_name=self._plan.step_name
        )
        self._steps.append(_Step(node, process, log))

    def _python(
        self, command: list[str], environment: Mapping[str, str], log: Path, **where: str
    ) -> subprocess.Popen[bytes]:
        """Start the run's Python as the run is started; it ends with this process."""
        wrapped = containers.wrap(
            [self._plan.python, *command],
            environment,
            self._plan.container,
            self._plan.device,
            self._plan.binds,
            self._plan.job_id,
            self._plan.scratch,
            **where,
        )
        with log.open("ab") as output:
            return subprocess.Popen(
                wrapped,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def _ray_start(self, node: Node, head: bool) -> list[str]:
        arguments = ["start", "--block", "--disable-usage-stats"]
        arguments += [f"--node-ip-address={node.address}"]
        if head:
            arguments += ["--head", f"--port={node.ports['head']}", "--include-dashboard=false"]
            arguments += [f"--ray-client-server-port={node.ports['client']}"]
        else:
            arguments += [f"--address={self.address}"]
        arguments += [f"--dashboard-agent-listen-port={node.ports['agent']}"]
        wanted = dict(self._plan.resources)
        for resource, option in (("CPU", "--num-cpus"), ("GPU", "--num-gpus")):
            if resource in wanted:
                arguments.append(f"{option}={wanted.pop(resource):g}")
        if wanted:
            arguments.append(f"--resources={json.dumps(wanted)}")
        return arguments

    def wait(self) -> None:
        """Wait until every node has joined.

        Raises:
            RunError: a node ended, or did not join in time.
        """
        count, timeout = str(len(self.nodes)), f"--timeout={self._plan.timeout_s:g}"
        log = self._plan.scratch / "logs" / "ray-nodes.log"
        process = self._python(
            ["-m", "rlprobe.frameworks.raynodes", count, timeout], self.environment(), log
        )
        said = time.monotonic()
        try:
            while process.poll() is None:
                self.check()
                said = _waiting(said, f"{len(self.nodes)} nodes to join Ray")
                time.sleep(0.2)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise RunError(
                f"fewer than {len(self.nodes)} nodes joined Ray within "
                f"{self._plan.timeout_s:g} s; logs are in {log.parent}:\n{_tail(log)}"
            )

    def stop(self) -> None:
        """End these steps, the head last, and no other process."""
        for step in reversed(self._steps):
            if step.process.poll() is None:
                # srun would wait for a node that does not answer
                (step.process.kill if step.node.name in self.gone else step.process.terminate)()
        deadline = time.monotonic() + _GRACE_S
        for step in self._steps:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.process.wait(max(0.1, deadline - time.monotonic()))
        if any(step.process.poll() is None for step in self._steps):
            # srun passes a signal on; a task that ignores it is Slurm's to end.
            slurm.cancel_steps(self._plan.step_name, os.environ["SLURM_JOB_ID"])
            for step in self._steps:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.process.wait(_GRACE_S)
                step.process.kill()
                step.process.wait()


@contextlib.contextmanager
def running(plan: Plan, count: int) -> Iterator[Cluster]:
    """A cluster over ``count`` nodes of this allocation, its head on this node.

    Raises:
        ConfigError: there is no allocation of that many nodes.
        RunError: a node has no address on the interface, ended, or did not join.
    """
    names = slurm.allocated_nodes(count)
    plan.token.touch(mode=0o600)
    plan.token.write_text(secrets.token_hex(32))
    cluster = Cluster(plan, _prepare(plan, names))
    try:
        cluster.start(cluster.nodes[0])
        _await_head(cluster)
        for node in cluster.nodes[1:]:
            cluster.start(node)
        cluster.wait()
        yield cluster
    finally:
        _clean_up(cluster, names, plan.job_id)


def _clean_up(cluster: Cluster, names: Sequence[str], job: str) -> None:
    """End the cluster and remove its directories, node by node.

    Nothing of it is an error: a run that is complete stays complete, and one that failed says why.
    A step over all nodes would fail for the one that is gone.
    """
    try:
        cluster.stop()
    except RunError as error:
        _log.warning("Ray's steps end with the job: %s", error)
    for name in names:
        if name in cluster.gone:
            _left(name, job, "it was lost")
            continue
        try:
            _on_every_node([name], "remove", job)
        except RunError as error:
            _left(name, job, error)


def _left(name: str, job: str, why: object) -> None:
    _log.warning(
        "%s: the run's directories on this node are left (%s, or where RLPROBE_NODE_TMP says): %s",
        name,
        nodelocal.of_job(job).root,
        why,
    )


def _await_head(cluster: Cluster) -> None:
    """Wait until the head answers: a node that joins too early gives up."""
    head = cluster.nodes[0]
    said = time.monotonic()
    while True:
        cluster.check()
        said = _waiting(said, f"Ray's head on {head.name}")
        with (
            contextlib.suppress(OSError),
            socket.create_connection((head.address, head.ports["head"]), timeout=2),
        ):
            return
        time.sleep(0.2)


def _waiting(said: float, what: str) -> float:
    """A line a minute about what is waited for; when the last one was."""
    now = time.monotonic()
    if now - said < SILENCE_S:
        return said
    _log.info("waiting for %s", what)
    return now


def _prepare(plan: Plan, names: Sequence[str]) -> list[Node]:
    interface = [] if plan.interface is None else ["--interface", plan.interface]
    # The head looks for its address towards the second node, every other towards the head.
    described: dict[str, Node] = {}
    for group, peer in (([names[0]], names[-1]), (names[1:], names[0])):
        if not group:
            continue
        where = slurm.node_address(peer)
        output = _on_every_node(group, "prepare", plan.job_id, "--peer", where, *interface)
        for line in output.splitlines():
            found = json.loads(line)
            described[found["node"]] = Node(
                found["node"], found["address"], found["ports"], found["interface"]
            )
    missing = [name for name in names if name not in described]
    if missing:
        raise RunError(f"no answer from {', '.join(missing)} of the allocation")
    return [described[name] for name in names]


def _on_every_node(names: Sequence[str], *arguments: str) -> str:
    return slurm.query(*slurm.srun(names), sys.executable, "-m", "rlprobe.runs.node", *arguments)


def _tail(log: Path) -> str:
    lines: Iterable[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in list(lines)[-_TAIL_LINES:])
