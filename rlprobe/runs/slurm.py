"""What rlprobe asks Slurm for while it runs inside an allocation."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from rlprobe.errors import ConfigError, RunError

#: Options that ``srun`` takes from the environment. They describe the job, and a step of one task
#: on one node must not inherit them (16 GPUs on one node, or two memory limits that exclude each
#: other).
_JOB_ONLY = (
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TRES_PER_TASK",
)


def srun(
    nodes: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
    name: str | None = None,
) -> list[str]:
    """One process on each of these nodes of the allocation, beside whatever already runs there.

    Args:
        nodes: their names; empty for the node this process is on.
        environ: the job's environment.
        name: the step's name, by which it can be found again.
    """
    command = ["/usr/bin/env"]
    for variable in _JOB_ONLY:
        command += ["-u", variable]
    count = max(1, len(nodes))
    command += ["srun", "--overlap", f"--nodes={count}", f"--ntasks={count}"]
    command += ["--ntasks-per-node=1", "--cpu-bind=none", "--mem=0", "--kill-on-bad-exit=1"]
    here = environ.get("SLURMD_NODENAME")
    wanted = list(nodes) or ([here] if here else [])
    if wanted:
        command.append(f"--nodelist={','.join(wanted)}")
    # Since 22.05 a step no longer takes this from its job, and would get one core.
    cpus = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE")
    if cpus:
        command.append(f"--cpus-per-task={cpus}")
    if name is not None:
        command.append(f"--job-name={name}")
    return command


def allocated_nodes(wanted: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The nodes of this job, this process's own first.

    Asked of Slurm: the environment of a step need not name the nodes of its job.

    Raises:
        ConfigError: there is no allocation, or it has fewer nodes than wanted.
    """
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        raise ConfigError(
            f"resources.nodes: {wanted} nodes need a Slurm allocation, and this process is in "
            "none; use a cluster's profile, or set nodes: 1"
        )
    compact = query("squeue", "--noheader", "--jobs", job, "--format", "%N").strip()
    names = query("scontrol", "show", "hostnames", compact).split()
    if len(names) < wanted:
        raise ConfigError(
            f"resources.nodes asks for {wanted}, but job {job} has {len(names)}: {', '.join(names)}"
        )
    here = environ.get("SLURMD_NODENAME")
    return sorted(names, key=lambda name: name != here)[:wanted]


def node_address(name: str) -> str:
    """Where Slurm itself reaches a node; its name where Slurm says no more.

    Names of nodes need not resolve: a site may have told its addresses to Slurm alone.
    """
    shown = query("scontrol", "--oneliner", "show", "node", name)
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return name if found is None or found[1] == "(null)" else found[1]


def allocated_devices(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Indices of this job's devices on this node, as ``0-3,6``; None where Slurm does not know.

    Args:
        name: the gres, as ``npu``.
        environ: the job's environment.
    """
    job = environ.get("SLURM_JOB_ID")
    here = environ.get("SLURMD_NODENAME")
    if job is None or here is None:
        return None
    shown = query("scontrol", "--details", "show", "job", job)
    pattern = rf"Nodes=(\S+) .*?GRES=\S*\b{re.escape(name)}\b[^,\s]*?\(IDX:([0-9,-]+)\)"
    for nodes, indices in re.findall(pattern, shown):
        if here in query("scontrol", "show", "hostnames", nodes).split():
            return str(indices)
    return None


def cancel_steps(name: str, job: str) -> None:
    """Cancel the steps of a job that bear this name, and no others."""
    shown = query("squeue", "--noheader", "--steps", "--jobs", job, "--format", "%i %j")
    steps = [line.split()[0] for line in shown.splitlines() if line.split()[1:] == [name]]
    if steps:
        query("scancel", *steps)


def query(*command: str) -> str:
    """Output of one of Slurm's commands.

    Raises:
        RunError: the command is missing or failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise RunError(f"{command[0]} is not on PATH; is this a Slurm node?") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{_plain(command)} did not answer within 60 s") from None
    if done.returncode:
        raise RunError(f"{_plain(command)} failed: {done.stderr.strip()}")
    return done.stdout


def _plain(command: Sequence[str]) -> str:
    """A command as somebody would type it: without the variables that it must not inherit."""
    words = list(command)
    if words[:1] == ["/usr/bin/env"]:
        words.pop(0)
        while words[:1] == ["-u"]:
            del words[:2]
    return " ".join(words)
