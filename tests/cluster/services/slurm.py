"""A real Slurm on this machine: a controller and one slurmd per host, as root, without systemd.

    python -m services.slurm up DIRECTORY      prints the export line for SLURM_CONF
    python -m services.slurm down DIRECTORY

Hosts gpu01 (gres gpu:8), npu01 and npu02 (gres npu:8) and cpu01 are network namespaces
(:mod:`services.hosts`), in partitions gpu, npu and cpu. Everything lives below DIRECTORY but
for the link /etc/slurm/slurm.conf: Snakemake's jobstep plugin drops SLURM_CONF. Debian's packages
slurm-wlm and munge are enough; there is no accounting, so sacct does not work, as on many a site.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services import hosts

PACKAGES = ("slurm-wlm", "munge", "iproute2")
_DEFAULT_CONF = Path("/etc/slurm/slurm.conf")
#: Host -> (partition, what it offers).
_NODES = {
    "gpu01": ("gpu", "Gres=gpu:8 Feature=h200,nvidia"),
    "npu01": ("npu", "Gres=npu:8 Feature=ascend910b,ascend"),
    "npu02": ("npu", "Gres=npu:8 Feature=ascend910b,ascend"),
    "cpu01": ("cpu", "Feature=x86"),
}
NODES = tuple(_NODES)
#: Two sessions on one machine take turns.
_TURN_S = 900.0
_CPUS = 64
_MEMORY_MB = 512_000

_CONF = """\
ClusterName=rlprobe
SlurmctldHost={controller_name}({controller})
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/pid/slurmctld
SlurmdPidFile={root}/pid/slurmd-%n
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
# Long runs ask after jobs that ended long ago.
MinJobAge=7200
# How long a node that does not answer is waited for; Slurm's own default is 300.
SlurmdTimeout=150
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# The machine has two cores; jobs ask for what a cluster has.
SlurmdParameters=config_overrides
GresTypes=gpu,npu
{nodes}
PartitionName=gpu Nodes=gpu01 MaxTime=1-0 State=UP
PartitionName=npu Nodes=npu01,npu02 MaxTime=1-0 State=UP
PartitionName=cpu Nodes=cpu01 Default=YES MaxTime=1-0 State=UP
"""
# gres/gpu has a plugin of its own, which counts nothing without files; gres/npu has none, and a
# bare count is what many a site has.
_GRES = """\
NodeName=gpu01 Name=gpu File={root}/dev/nvidia[0-7] Flags=nvidia_gpu_env
NodeName=npu[01-02] Name=npu Count=8
"""


@dataclass(frozen=True)
class Slurm:
    """One such cluster, below ``root``."""

    root: Path

    @property
    def conf(self) -> Path:
        return self.root / "etc" / "slurm.conf"

    def up(self) -> None:
        """Start what is not running. Idempotent.

        Raises:
            RuntimeError: another cluster's configuration is at /etc/slurm, or a daemon did not
                come up.
        """
        if _DEFAULT_CONF.exists() and not _DEFAULT_CONF.is_symlink():
            raise RuntimeError(f"{_DEFAULT_CONF} belongs to a real cluster; not touching it")
        _wait(self._alone, "another session's cluster to end", _TURN_S)
        for name in ("etc", "log", "state", "pid", "dev", "munge"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for name in NODES:
            (self.root / "spool" / name).mkdir(parents=True, exist_ok=True)
        addresses = hosts.up(NODES)
        self._configure(addresses)
        os.environ["SLURM_CONF"] = str(self.conf)
        _DEFAULT_CONF.parent.mkdir(exist_ok=True)
        _DEFAULT_CONF.unlink(missing_ok=True)
        _DEFAULT_CONF.symlink_to(self.conf)
        self._munge()
        self._daemon("slurmctld", ["slurmctld", "-f", str(self.conf)])
        _wait(lambda: _works("scontrol", "ping"), "slurmctld")
        for name in NODES:
            command = [*hosts.inside(name), "slurmd", "-N", name, "-f", str(self.conf)]
            self._daemon(f"slurmd-{name}", command)
        _wait(self._all_usable, "the nodes")

    def down(self) -> None:
        """Stop exactly these daemons, jobs first, and remove the hosts, unless another has them."""
        if not self._alone():
            return
        if self._alive("slurmctld"):
            subprocess.run(["scancel", "--user=root"], env=self.environ(), check=False)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            self._stop(name)
        hosts.down(NODES)
        if _DEFAULT_CONF.is_symlink() and _DEFAULT_CONF.readlink() == self.conf:
            _DEFAULT_CONF.unlink()

    def environ(self) -> dict[str, str]:
        """Environment of a user of this cluster."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def _alone(self) -> bool:
        """Whether no other session's cluster has the hosts and the link at /etc/slurm."""
        if not _DEFAULT_CONF.is_symlink() or _DEFAULT_CONF.readlink() == self.conf:
            return True
        other = Slurm(_DEFAULT_CONF.readlink().parent.parent)
        return not other._alive("slurmctld")

    def _configure(self, addresses: dict[str, str]) -> None:
        hostname = os.uname().nodename
        lines = [
            f"NodeName={name} NodeHostname={hostname} NodeAddr={addresses[name]} "
            f"Port={16821 + index} CPUs={_CPUS} RealMemory={_MEMORY_MB} {offers} State=UNKNOWN"
            for index, (name, (_, offers)) in enumerate(_NODES.items())
        ]
        text = _CONF.format(
            controller_name=hostname,
            controller=hosts.CONTROLLER,
            root=self.root,
            nodes="\n".join(lines),
        )
        self.conf.write_text(text)
        (self.conf.parent / "gres.conf").write_text(_GRES.format(root=self.root))
        for index in range(8):
            (self.root / "dev" / f"nvidia{index}").touch()

    def _munge(self) -> None:
        key = self.root / "munge" / "key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(os.urandom(128))
        listens = self.root / "munge" / "socket"
        self._daemon(
            "munged",
            [
                "munged",
                "--force",
                f"--key-file={key}",
                f"--socket={listens}",
                f"--pid-file={self._pid_file('munged')}",
                f"--log-file={self.root}/log/munged.log",
                f"--seed-file={self.root}/munge/seed",
            ],
        )
        _wait(lambda: _works("munge", f"--socket={listens}", "--no-input"), "munged")

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        if not self._alive(name):
            subprocess.run(command, env=self.environ(), check=True, stdin=subprocess.DEVNULL)
            _wait(lambda: self._alive(name), name)

    def _pid_file(self, name: str) -> Path:
        return self.root / "pid" / name

    def _pid(self, name: str) -> int | None:
        """Its process, if the pid file is not a leftover that names another program's."""
        with contextlib.suppress(OSError, ValueError):
            pid = int(self._pid_file(name).read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if name.partition("-")[0].encode() in command:
                return pid
        return None

    def _alive(self, name: str) -> bool:
        return self._pid(name) is not None

    def _stop(self, name: str) -> None:
        pid = self._pid(name)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            _wait(lambda: self._pid(name) is None, f"the end of {name}")
        self._pid_file(name).unlink(missing_ok=True)

    def _all_usable(self) -> bool:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %t"],
            env=self.environ(),
            capture_output=True,
            text=True,
            check=False,
        )
        states = dict(line.split() for line in shown.stdout.splitlines())
        for name, state in states.items():
            # A node that the saved state has as down, from an earlier crash, is put back.
            if state.rstrip("*") in ("down", "drain"):
                _works("scontrol", "update", f"nodename={name}", "state=resume")
        usable = {"idle", "mix", "alloc", "comp"}
        return len(states) == len(NODES) and set(states.values()) <= usable


def install() -> None:
    """Install Slurm where this machine lacks it and is a Debian whose root we are."""
    present = all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "ip"))
    if not present and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
            subprocess.run(
                ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command],
                env=environment,
                check=False,
                stdout=subprocess.DEVNULL,
            )


def why_not() -> str | None:
    """Why this cluster cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "needs root, to start slurmd and make network namespaces"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "ip") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install {' '.join(PACKAGES)})"
    if _DEFAULT_CONF.exists() and not _DEFAULT_CONF.is_symlink():
        return f"{_DEFAULT_CONF} belongs to a real cluster"
    return hosts.why_not()


@contextlib.contextmanager
def running(root: Path) -> Iterator[Slurm]:
    """A cluster for the time of a test session."""
    cluster = Slurm(root)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _wait(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {seconds:g} s for {what}; logs are in the cluster's log/")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.slurm")
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    cluster = Slurm(given.directory.resolve())
    if given.what == "down":
        cluster.down()
        return
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"no Slurm here: {reason}")
    cluster.up()
    print(f"export SLURM_CONF={cluster.conf}")


if __name__ == "__main__":
    main()
