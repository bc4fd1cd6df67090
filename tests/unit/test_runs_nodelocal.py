"""Do two jobs on one node stay out of each other's way?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rlprobe.errors import ConfigError, RunError
from rlprobe.runs import nodelocal


def test_two_runs_in_one_allocation_have_directories_of_their_own() -> None:
    environ = {"SLURM_JOB_ID": "12"}
    names = {nodelocal.job_id(environ, pid) for pid in (1, 2)}
    assert names == {"12.1", "12.2"}
    assert len({nodelocal.of_job(name, {}).root for name in names}) == 2


def test_directories_are_private_and_go_away(tmp_path: Path) -> None:
    local = nodelocal.of_job("12.1", {nodelocal.BASE_ENV: str(tmp_path)})
    local.make()
    local.make()
    assert local.root.stat().st_mode & 0o777 == 0o700
    assert local.tmp.is_dir()
    assert local.home.is_dir()
    local.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "writable by others"])
def test_a_directory_that_somebody_else_prepared_is_refused(tmp_path: Path, kind: str) -> None:
    local = nodelocal.of_job("12.1", {nodelocal.BASE_ENV: str(tmp_path)})
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        local.root.symlink_to(tmp_path / "elsewhere")
    else:
        local.root.mkdir()
        local.root.chmod(0o777)
    with pytest.raises(RunError, match="not this user's own"):
        local.make()


def test_a_base_too_long_for_ray_s_sockets_is_refused() -> None:
    nodelocal.check_ray_path(nodelocal.of_job("1234567.4194304", {}).tmp)
    base = {nodelocal.BASE_ENV: "/local/scratch/of/some/user"}
    with pytest.raises(ConfigError, match=nodelocal.BASE_ENV):
        nodelocal.check_ray_path(nodelocal.of_job("1234567.4194304", base).tmp)


@pytest.mark.parametrize("name", ["../up", "a/b", "a b", ""])
def test_a_job_name_cannot_lead_elsewhere(name: str) -> None:
    with pytest.raises(ConfigError, match="job name"):
        nodelocal.of_job(name, {})


def test_a_base_with_shell_signs_is_refused() -> None:
    with pytest.raises(ConfigError, match=nodelocal.BASE_ENV):
        nodelocal.of_job("12.1", {nodelocal.BASE_ENV: "/tmp/$(id)"})


def test_what_a_killed_run_left_goes_and_what_may_live_stays(tmp_path: Path) -> None:
    environ = {nodelocal.BASE_ENV: str(tmp_path)}
    killed, alive, elsewhere, foreign = (nodelocal.of_job(f"12.{n}", environ) for n in (1, 2, 3, 4))
    for local in (killed, alive, elsewhere, foreign):
        local.make()
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    (killed.root / "owner").write_text(f"{os.uname().nodename} {gone.stdout.strip()}")
    alive.own()
    (elsewhere.root / "owner").write_text(f"another-node {gone.stdout.strip()}")
    nodelocal.sweep(environ)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"rlprobe-12.2", "rlprobe-12.3", "rlprobe-12.4"}
