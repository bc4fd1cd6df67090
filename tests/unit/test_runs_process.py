"""Does a run leave nothing behind, however it ends?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlprobe.runs import process

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
