"""Does a run leave nothing behind, however it ends?"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlprobe.runs import process, sharedmemory

#: Another test session on this machine has processes of its own.
_HERE = os.getpid()


def _alive(run_id: str) -> list[int]:
    return process._marked(run_id)


def test_output_goes_to_the_log_and_the_status_is_returned(tmp_path: Path) -> None:
    log = tmp_path / "log"
    status = process.run(
        ["bash", "-c", "echo out; echo err >&2; exit 3"],
        run_id=f"t-status-{_HERE}",
        log=log,
        watch=lambda: None,
        interval_s=0.01,
    )
    assert status == 3
    assert log.read_text().split() == ["out", "err"]


def test_the_watcher_is_called_once_more_after_the_end(tmp_path: Path) -> None:
    written = tmp_path / "written"
    seen: list[bool] = []
    process.run(
        ["bash", "-c", f"touch {written}"],
        run_id=f"t-watch-{_HERE}",
        log=tmp_path / "log",
        watch=lambda: seen.append(written.exists()),
        interval_s=5,
    )
    assert seen[-1]


def test_a_daemon_that_left_its_parent_is_ended_too(tmp_path: Path) -> None:
    script = "setsid sleep 60 & disown; exit 0"
    process.run(
        ["bash", "-c", script],
        run_id=f"t-daemon-{_HERE}",
        log=tmp_path / "log",
        watch=lambda: None,
        interval_s=0.01,
    )
    assert _alive(f"t-daemon-{_HERE}") == []


def test_another_runs_processes_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, process.MARK: f"t-other-{_HERE}"})
    try:
        process.run(
            ["true"],
            run_id=f"t-mine-{_HERE}",
            log=tmp_path / "log",
            watch=lambda: None,
            interval_s=0.01,
        )
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_nothing_survives_a_sigterm(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from rlprobe.runs import process; "
        f"process.run(['bash', '-c', 'setsid sleep 60 & sleep 60'], run_id='t-term-{_HERE}', "
        f"log=Path({str(tmp_path / 'log')!r}), watch=lambda: None)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while len(_alive(f"t-term-{_HERE}")) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_alive(f"t-term-{_HERE}")) >= 3, "the run never started"
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=30) == 128 + signal.SIGTERM
    assert _alive(f"t-term-{_HERE}") == []


def test_ctrl_c_is_said_and_nothing_survives_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlprobe import cli\n"
        "from rlprobe.cli import run; from rlprobe.runs import process\n"
        "run.run = lambda args: process.run(['bash', '-c', 'setsid sleep 60 & sleep 60'], "
        f"run_id='t-int-{_HERE}', log=Path({str(tmp_path / 'log')!r}), watch=lambda: None)\n"
        "sys.exit(cli.main(['run', '--config', 'x', '--role', 'target']))"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(_alive(f"t-int-{_HERE}")) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_alive(f"t-int-{_HERE}")) >= 3, "the run never started"
    runner.send_signal(signal.SIGINT)
    assert runner.communicate(timeout=30)[1] == "rlprobe: error: interrupted\n"
    assert runner.returncode == 130
    assert _alive(f"t-int-{_HERE}") == []


def test_the_command_ends_when_rlprobe_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from rlprobe.runs import process; "
        f"process.run(['sleep', '60'], run_id='t-kill-{_HERE}', "
        f"log=Path({str(tmp_path / 'log')!r}), watch=lambda: None)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 20
    while not _alive(f"t-kill-{_HERE}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(f"t-kill-{_HERE}"), "the run never started"
    runner.kill()
    runner.wait()
    while _alive(f"t-kill-{_HERE}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _alive(f"t-kill-{_HERE}") == []


#: Shares memory and dies without cleaning up, as a worker that Ray kills with the tracker that
#: Python gave it. Arguments: where to say the segment's name, and what to wait for.
_SHARES = """
import os, pathlib, signal, sys, time
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(create=True, size=1 << 20)
pathlib.Path(sys.argv[1]).write_text(made.name)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.01)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
#: Has a file mapped until it is killed; says when.
_MAPS = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(60)
"""


def _shared(tmp_path: Path, meanwhile: Callable[[Path], object]) -> Path:
    """What a run's process made in /dev/shm, once the run has ended."""
    name, go = tmp_path / "name", tmp_path / "go"
    looked = [0]

    def watch() -> None:
        if name.exists() and name.read_text() and not go.exists():
            looked[0] += 1
            if looked[0] == 1:
                meanwhile(Path("/dev/shm", name.read_text()))
            elif looked[0] > 3:
                go.touch()

    process.run(
        [sys.executable, "-c", _SHARES, str(name), str(go)],
        run_id=f"t-shared-{tmp_path.name}-{_HERE}",
        log=tmp_path / "log",
        watch=watch,
        interval_s=0.01,
    )
    return Path("/dev/shm", name.read_text())


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LOOK_S", 0.0)


@pytest.mark.usefixtures("closely")
def test_memory_that_a_killed_process_shared_is_removed(tmp_path: Path) -> None:
    sizes = []
    left = _shared(tmp_path, lambda path: sizes.append(path.stat().st_size))
    assert sizes == [1 << 20] and not left.exists()


@pytest.mark.usefixtures("closely")
def test_memory_that_somebody_else_has_mapped_stays(tmp_path: Path) -> None:
    others = []

    def other(path: Path) -> None:
        others.append(subprocess.Popen([sys.executable, "-c", _MAPS, path], stdout=subprocess.PIPE))
        assert others[0].stdout is not None
        assert others[0].stdout.readline() == b"mapped\n"

    left = _shared(tmp_path, other)
    try:
        assert left.exists()
        (segment,) = sharedmemory.mapped([others[0].pid])
        others[0].kill()
        others[0].wait()
        # a file of that name which is another one, as a container has
        assert sharedmemory.remove({dataclasses.replace(segment, inode=segment.inode + 1)}) == []
        assert sharedmemory.remove({segment}) == [str(left)] and not left.exists()
    finally:
        left.unlink(missing_ok=True)


def test_a_process_amid_becoming_another_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between its old memory and the new a process shows an empty environment."""
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "RLPROBE_TEST_HELD": "one"})
    real, looks = Path.read_bytes, []

    def empty_at_first(path: Path) -> bytes:
        if path == Path(f"/proc/{child.pid}/environ"):
            looks.append(path)
            if len(looks) < 3:
                return b""
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", empty_at_first)
    try:
        assert process.holding("RLPROBE_TEST_HELD", "one") == [child.pid]
        assert process.holding("RLPROBE_TEST_HELD", "another") == []
    finally:
        child.kill()
        child.wait()
    assert process.holding("RLPROBE_TEST_HELD", "one") == []


def test_a_process_without_an_environment_is_not_waited_for_long() -> None:
    child = subprocess.Popen(["/bin/sleep", "60"], env={})
    try:
        begun = time.monotonic()
        assert process.holding("RLPROBE_TEST_HELD", "one") == []
        assert time.monotonic() - begun < 30  # the wait is bounded, whatever the machine does
    finally:
        child.kill()
        child.wait()
