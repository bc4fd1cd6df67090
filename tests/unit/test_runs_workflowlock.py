"""Is a workflow's lock taken away only where its process is known to be dead?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlprobe.claims import Holder
from rlprobe.runs import workflowlock
from rlprobe.runs.workflowlock import DEAD, FREE, HOLDER, LOCKS, UNKNOWN, look


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    (tmp_path / LOCKS).mkdir(parents=True)
    (tmp_path / LOCKS / "0.input.lock").write_text("a\n")
    return tmp_path


def held(directory: Path, **other: object) -> None:
    (directory / HOLDER).write_bytes(Holder.me()._replace(**other).to_bytes())  # type: ignore[arg-type]


def test_without_a_lock_there_is_nothing_to_take_away(tmp_path: Path) -> None:
    assert look(tmp_path) == (FREE, "")


def test_a_dead_process_of_this_host_holds_nothing(locked: Path) -> None:
    held(locked, began=1)
    assert look(locked)[0] == DEAD


@pytest.mark.parametrize(
    "other", [{}, {"host": "node17"}, {"host": "node17", "boot": "x"}, {"namespace": "pid:[1]"}]
)
def test_what_lives_or_is_elsewhere_keeps_its_lock(locked: Path, other: dict[str, str]) -> None:
    held(locked, **other)
    state, message = look(locked)
    assert state == UNKNOWN and "snakemake --unlock" in message
    assert other.get("host", Holder.me().host) in message


def test_a_lock_of_nobody_known_is_taken_away_only_on_a_disk_of_this_host(
    locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflowlock, "_of_one_host", lambda _: False)
    assert look(locked)[0] == UNKNOWN
    monkeypatch.setattr(workflowlock, "_of_one_host", lambda _: True)
    assert look(locked)[0] == DEAD


def test_an_older_holder_says_nothing_of_a_later_lock(
    locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workflowlock, "_of_one_host", lambda _: False)
    held(locked, began=1)
    before = time.time() - 3600
    os.utime(locked / HOLDER, (before, before))
    assert look(locked)[0] == UNKNOWN


def test_a_snakemake_that_works_in_the_directory_is_found(locked: Path) -> None:
    held(locked, began=1)
    program = locked / "snakemake"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "60"], cwd=locked)
    try:
        state, message = look(locked)
        assert state == UNKNOWN and f"process {process.pid}" in message
    finally:
        process.kill()
        process.wait()
    assert look(locked)[0] == DEAD


def test_what_it_starts_is_the_process_that_it_wrote_down(tmp_path: Path) -> None:
    code = "import os, pathlib; print(os.getpid(), pathlib.Path('x').write_text('x'))"
    command = [sys.executable, "-m", "rlprobe.runs.workflowlock", "--", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    holder = json.loads((tmp_path / HOLDER).read_text())
    assert holder["pid"] == int(done.stdout.split()[0])
    found = Holder.read(tmp_path / HOLDER)
    assert found is not None and found.is_dead()
