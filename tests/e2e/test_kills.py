"""SIGKILL in the middle of things: does the next call complete with the same result?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.runs.process import MARK
from tests.e2e.conftest import ROOT, Aligned

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def _processes(word: str, where: str) -> list[int]:
    """Processes with ``word`` in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / where).read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in text:
                found.append(int(entry.name))
    return found


def _wait(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)


@pytest.fixture
def workflow() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Start an alignment in the background; whatever is left of it ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(config: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["workflow/align", str(config)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.long
def test_a_training_job_killed_in_the_middle_is_run_again(
    aligned: Aligned,
    configure: Callable[..., Path],
    align: Callable[[Path], Aligned],
    workflow: Callable[[Path], subprocess.Popen[bytes]],
) -> None:
    # another declared variable is another run, which nothing reads
    side = {
        "device": "cpu",
        "lock": "requirements/lock.txt",
        "environment": {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_CBWR": "COMPATIBLE",
            "RLPROBE_TEST": "killed",
        },
    }
    # msprobe's own table is made of the same runs in test_msprobe_by_hand
    quick = {"official_table": False}
    config = configure("config/config.yaml", "killed", target=side, analysis=quick)
    running = workflow(config)
    scratch = aligned.store / "scratch"
    _wait(lambda: list(scratch.glob("*/side/progress.jsonl")), 240, "a stage of the target")
    ours = f"rlprobe run --config {config}"
    jobs = [pid for pid in _processes(ours, "cmdline") if _is_python(pid)]
    assert jobs
    for pid in jobs:
        os.kill(pid, signal.SIGKILL)
    assert running.wait(timeout=60) == 1
    attempt = next(scratch.iterdir())
    assert not (attempt / "side/run.json").exists()
    again = align(config)
    assert again.status == 0, again.output
    assert again.diagnosis["verdict"] == "aligned"
    assert list(scratch.iterdir()) == []
    assert _processes(f"{MARK}={attempt.name}", "environ") == []
    for stage in stages.UPDATE_STAGES:
        name = f"records/{stage}.parquet"
        here, there = again.run("target") / name, aligned.run("target") / name
        assert pl.read_parquet(here).equals(pl.read_parquet(there)), stage


def _is_python(pid: int) -> bool:
    return "python" in Path(f"/proc/{pid}/exe").resolve().name


def test_a_killed_comparison_is_made_again(
    aligned: Aligned,
    align: Callable[[Path], Aligned],
    workflow: Callable[[Path], subprocess.Popen[bytes]],
) -> None:
    before = aligned.diagnosis
    summary = aligned.results / "compare/target" / stages.ACTOR_UPDATE / "summary.json"
    shutil.rmtree(summary.parent)
    for name in ("diagnosis.json", "report.html", "verdict.txt"):
        (aligned.results / name).unlink()

    def comparing() -> list[int]:
        found = set(_processes("rlprobe compare", "cmdline"))
        return [pid for pid in _processes(str(aligned.results), "cmdline") if pid in found]

    running = workflow(aligned.config)
    _wait(comparing, 60, "a comparison")
    for pid in comparing():
        os.kill(pid, signal.SIGKILL)
    assert running.wait(timeout=120) == 1
    if summary.exists():  # killed after its last file: whole, or not there at all
        json.loads(summary.read_text())
    again = align(aligned.config)
    assert again.status == 0, again.output
    assert summary.exists()
    assert again.diagnosis == before
