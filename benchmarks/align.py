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
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
_STAMP = re.compile(r"^\[(\w{3} \w{3} +\d+ [\d:]{8} \d{4})\]$")
_STARTS = re.compile(r"^Job (\d+): (.+)$")
_ENDS = re.compile(r"^Finished jobid: (\d+) \(Rule: (\w+)\)$")


def align(settings: Namespace) -> dict[str, Any]:
    """Wall time of ``make align`` after installation, with where it goes."""
    with _alignment() as config:
        seconds, mib, output = _run(config)
        again, _, second = _run(config)
        if "Nothing to be done" not in second:
            raise RuntimeError(f"a second call had something to do:\n{second[-2000:]}")
        runs = _runs(config)
    return {
        **_result("align", seconds, mib, "workflow/align config/config.yaml"),
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
        if "run_benchmark" in output:
            raise RuntimeError(f"something was trained:\n{output[-2000:]}")
    command = "workflow/align config/config.yaml, results deleted before"
    return {**_result("report", seconds, mib, command), "jobs_s": _jobs(output)}


BENCHMARKS: dict[str, Callable[[Namespace], dict[str, Any]]] = {"align": align, "report": report}


def _result(name: str, seconds: float, mib: float, command: str) -> dict[str, Any]:
    return {
        "name": name,
        "ours_s": round(seconds, 2),
        "peer_s": None,
        "ratio": None,
        "ours_mib": round(mib),
        "peer_mib": None,
        "command": command,
    }


@contextmanager
def _alignment() -> Iterator[Path]:
    """The default configuration with a store and results of its own."""
    with tempfile.TemporaryDirectory(prefix="rlprobe-align-") as directory:
        raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        raw |= {"store": f"{directory}/store", "results": f"{directory}/results"}
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


def _jobs(output: str) -> dict[str, list[float]]:
    """Rule -> [start, end] in seconds since the first job, from the earliest to the last of it."""
    now: datetime | None = None
    began: dict[str, datetime] = {}
    spans: dict[str, list[datetime]] = {}
    for line in output.splitlines():
        if stamp := _STAMP.match(line):
            now = datetime.strptime(stamp.group(1), "%a %b %d %H:%M:%S %Y")
        elif now is not None and (job := _STARTS.match(line)):
            began[job.group(1)] = now
        elif now is not None and (job := _ENDS.match(line)) and job.group(1) in began:
            start = began[job.group(1)]
            span = spans.setdefault(job.group(2), [start, now])
            span[:] = [min(span[0], start), max(span[1], now)]
    first = min((span[0] for span in spans.values()), default=None)
    return {
        rule: [(moment - first).total_seconds() for moment in span]
        for rule, span in spans.items()
        if first is not None
    }


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
