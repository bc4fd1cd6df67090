"""The default alignment from an empty store, a second call, and the page anew from the store."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
#: A line of a finished job (``rlprobe.runs.console``): what it was, and how long it took.
_JOB = re.compile(r"^\[ *\d+/\d+\] (.+)  ((?:\d+ h )?(?:\d+ min)? ?(?:[\d.]+ s)?)$", re.MULTILINE)
_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}


def align(settings: Namespace) -> dict[str, Any]:
    """Wall time of ``make align`` after installation, with where it goes; the peer is the same
    alignment under Ray."""
    peer = None
    if not settings.no_peer:
        with _alignment(ray=True) as config:
            peer = _run(config)[:2]
    with _alignment() as config:
        seconds, mib, output = _run(config)
        again, _, second = _run(config)
        if "Nothing to be done" not in second:
            raise RuntimeError(f"a second call had something to do:\n{second[-2000:]}")
        runs = _runs(config)
    return {
        **_result("align", seconds, mib, "workflow/align config/config.yaml", peer),
        "jobs_s": _jobs(output),
        "runs": runs,
        "second_call_s": round(again, 2),
    }


def report(settings: Namespace) -> dict[str, Any]:
    """Comparisons, diagnosis and page from a store that holds the runs; nothing is trained."""
    with _alignment() as config:
        _run(config)
        shutil.rmtree(yaml.safe_load(config.read_text())["results"])
        seconds, mib, output = _run(config)
        if any(" on cpu, log " in job for job in _jobs(output)):
            raise RuntimeError(f"something was trained:\n{output[-2000:]}")
    command = "workflow/align config/config.yaml, results deleted before"
    return {**_result("report", seconds, mib, command), "jobs_s": _jobs(output)}


BENCHMARKS: dict[str, Callable[[Namespace], dict[str, Any]]] = {"align": align, "report": report}


def _result(
    name: str, seconds: float, mib: float, command: str, peer: tuple[float, float] | None = None
) -> dict[str, Any]:
    return {
        "name": name,
        "ours_s": round(seconds, 2),
        "peer_s": round(peer[0], 2) if peer else None,
        "ratio": round(peer[0] / seconds, 2) if peer else None,
        "ours_mib": round(mib),
        "peer_mib": round(peer[1]) if peer else None,
        "command": command,
    }


@contextmanager
def _alignment(**changes: Any) -> Iterator[Path]:
    """The default configuration with a store and results of its own, and what else is changed."""
    with tempfile.TemporaryDirectory(prefix="rlprobe-align-") as directory:
        raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        raw |= {"store": f"{directory}/store", "results": f"{directory}/results", **changes}
        config = Path(directory, "config.yaml")
        config.write_text(yaml.safe_dump(raw, sort_keys=False))
        yield config


def _run(config: Path) -> tuple[float, float, str]:
    """Seconds, MiB that the machine had less free at the worst moment, and the output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    before = _available()
    least, ended = [before], threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            least[0] = min(least[0], _available())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    done = subprocess.run(
        ["workflow/align", str(config)],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    ended.set()
    watcher.join()
    if done.returncode != 0:
        raise RuntimeError(f"workflow/align ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return seconds, before - least[0], done.stdout


def _available() -> float:
    """MiB.  Ray's processes leave their parents, so no process tree holds them all."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    assert found is not None
    return int(found.group(1)) / 1024


def _jobs(output: str) -> dict[str, float]:
    """Seconds of each job, by what the terminal calls it."""
    return {what: _seconds(took) for what, took in _JOB.findall(output)}


def _seconds(took: str) -> float:
    words = took.split()
    return sum(float(n) * _UNITS[unit] for n, unit in zip(words[::2], words[1::2], strict=True))


def _runs(config: Path) -> dict[str, dict[str, float]]:
    """Role -> seconds of the framework's process and, of these, of the captured stages."""
    raw = yaml.safe_load(config.read_text())
    plan = json.loads(Path(raw["results"], raw["name"], "alignment.json").read_text())["runs"]
    found = {}
    for role, run in plan.items():
        manifest = json.loads(Path(raw["store"], "runs", run["key"], "manifest.json").read_text())
        volatile = manifest["volatile"]
        run_times = volatile["run"]
        found[role] = {
            "seconds": round(run_times["ended"] - run_times["started"], 1),
            "in_stages": round(sum(stage["seconds"] for stage in volatile["captured"]), 1),
        }
    return found
