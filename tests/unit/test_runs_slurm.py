"""Does rlprobe read its allocation right, whatever Slurm leaves in the environment?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlprobe.errors import ConfigError, RunError
from rlprobe.runs import slurm

_DETAILS = """JobId=7 JobName=x
   JOB_GRES=npu:8
     Nodes=n1 CPU_IDs=0-7 Mem=100 GRES=npu:910b:4(IDX:0-2,6)
     Nodes=n[2-3] CPU_IDs=0-7 Mem=100 GRES=gpu:2(IDX:1,3),npu:4(IDX:4-7)
     Nodes=n4 CPU_IDs=0-7 Mem=100 GRES=npu:4(CNT:4)
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands for a job with four nodes, as 22.05 prints them."""
    scripts = {
        "squeue": 'case "$*" in *--steps*) echo "7.0 rlprobe-ray-7.5"; echo "7.1 train"; '
        'echo "7.2 rlprobe-ray-7.55";; *) echo "n[1-4]";; esac',
        "scontrol": 'case "$*" in *hostnames*n\\[1-4\\]) printf "n1\\nn2\\nn3\\nn4\\n";; '
        '*hostnames*n\\[2-3\\]) printf "n2\\nn3\\n";; *hostnames*) echo "$3";; '
        f"*) cat {tmp_path}/details;; esac",
        "scancel": f'echo "$@" >> {tmp_path}/cancelled',
    }
    (tmp_path / "details").write_text(_DETAILS)
    for name, body in scripts.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_node_this_process_is_on_comes_first(commands: Path) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n3"}
    assert slurm.allocated_nodes(3, environ) == ["n3", "n1", "n2"]


@pytest.mark.parametrize(
    ("shown", "address"),
    [
        ("NodeName=n2 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=n2 Version=22.05", "10.1.2.3"),
        ("NodeName=n2 Arch=x86_64 NodeAddr=n2 NodeHostName=n2", "n2"),
        ("NodeName=n2 NodeAddr=(null)", "n2"),
        ("NodeName=n2 State=DOWN", "n2"),
    ],
)
def test_a_node_is_reached_where_slurm_reaches_it(commands: Path, shown: str, address: str) -> None:
    (commands / "details").write_text(shown)
    assert slurm.node_address("n2") == address


def test_fewer_nodes_than_the_run_needs_are_refused(commands: Path) -> None:
    with pytest.raises(ConfigError, match="asks for 5, but job 7 has 4"):
        slurm.allocated_nodes(5, {"SLURM_JOB_ID": "7"})


def test_several_nodes_outside_an_allocation_are_refused() -> None:
    with pytest.raises(ConfigError, match="need a Slurm allocation"):
        slurm.allocated_nodes(2, {})


@pytest.mark.parametrize(
    ("node", "gres", "indices"),
    [("n1", "npu", "0-2,6"), ("n3", "npu", "4-7"), ("n2", "gpu", "1,3"), ("n4", "npu", None)],
)
def test_the_devices_of_this_node_are_read_where_slurm_knows_them(
    commands: Path, node: str, gres: str, indices: str | None
) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": node}
    assert slurm.allocated_devices(gres, environ) == indices


def test_only_steps_of_exactly_this_name_are_cancelled(commands: Path) -> None:
    slurm.cancel_steps("rlprobe-ray-7.5", "7")
    assert (commands / "cancelled").read_text() == "7.0\n"


def test_a_host_without_slurm_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RunError, match="squeue is not on PATH"):
        slurm.query("squeue")


def test_a_step_that_failed_is_named_as_one_would_type_it(commands: Path) -> None:
    srun = commands / "srun"
    srun.write_text("#!/bin/sh\necho 'n2 finds no route' >&2; exit 1\n")
    srun.chmod(0o755)
    with pytest.raises(RunError) as raised:
        slurm.query(*slurm.srun(["n2"], environ={}), "hostname")
    said = str(raised.value)
    assert said.startswith("srun --overlap --nodes=1") and said.endswith("n2 finds no route")
    assert "-u " not in said
