"""Does a whole alignment that is killed over and over end in the verdict that it would have had?

The pipeline as ``make align`` starts it: a training of each role, commits, comparisons, diagnosis,
page. In the long form only; ``tests/e2e/test_kills.py`` and ``tests/workflow`` kill one each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from rlprobe.runs.process import MARK
from rlprobe.store.verify import verify
from tests.soak.conftest import MINUTES
from tests.workflow.project import Project


@pytest.mark.skipif(not MINUTES, reason="trains: make soak MINUTES=n")
def test_a_pipeline_that_is_killed_over_and_over(
    root: Path, memory: Path, chance: random.Random, figures: Counter[str]
) -> None:
    project = Project(memory / "pipeline", root)
    end = time.monotonic() + 60 * MINUTES * 0.15
    while time.monotonic() < end:
        running = subprocess.Popen(
            ["workflow/align", "a.yaml"], cwd=project.directory, env=project.environment,
            start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            running.wait(timeout=chance.uniform(3, 60))
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            figures["kills: a pipeline that trains"] += 1
            continue
        assert running.returncode == 0
        # it had ended before it could be killed: from the comparisons on, once more
        for path in (project.directory / "results/a").rglob("summary.json"):
            path.unlink()
    done = project.align()
    figures["tracebacks"] += "Traceback" in done.stdout
    assert done.returncode == 0, done.stdout
    said = json.loads((project.directory / "results/a/diagnosis.json").read_text())
    figures["wrong verdicts"] += said["verdict"] != "aligned"
    assert said["verdict"] == "aligned", said["sentence"]
    store = project.directory / project.raw["store"]
    assert verify(store).problems == []
    assert not list((store / "scratch").glob("*")), "a killed run's scratch space is still there"
    assert _left(store) == []


def _left(store: Path) -> list[str]:
    """Processes of its runs that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}=".encode() in environment and os.fsencode(store) in environment:
            found.append(entry.name)
    return found
