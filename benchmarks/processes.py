"""Whole processes, timed: wall time, and the peak memory of a process and its children together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Seconds between two looks at memory; a process's own peak is the kernel's, so exact.
_INTERVAL = 0.02
_PAGE = 4096


@dataclass(frozen=True)
class Run:
    """One process from start to end."""

    seconds: float
    mib: float
    #: Processor time of the process and of the children it waited for.
    cpu: float = 0.0


def program(name: str) -> str:
    """A console script installed beside this interpreter."""
    return str(Path(sys.executable).with_name(name))


def timed(command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None) -> Run:
    """Run a command to its end.

    What it compiles of Python may be kept, whatever the caller's environment says: else modules
    that changed since they were installed are compiled in each run, and that would be measured.

    Raises:
        RuntimeError: it failed; its output is in the message.
    """
    kept = dict(os.environ if environment is None else environment)
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    log = cwd / "benchmark.log"
    with log.open("wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=kept
        )
        peak = _Peak(process.pid)
        peak.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    code = process.returncode = os.waitstatus_to_exitcode(status)
    peak.stop()
    if code != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{log.read_text()[-2000:]}")
    return Run(seconds, peak.mib, usage.ru_utime + usage.ru_stime)


def quickest(done: Sequence[Run]) -> Run:
    """The quickest of several runs, with the largest peak and the least processor time."""
    return Run(
        min(run.seconds for run in done),
        max(run.mib for run in done),
        min(run.cpu for run in done),
    )


class _Peak(threading.Thread):
    """Watches the resident memory of a process tree."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.mib = 0.0

    def run(self) -> None:
        while not self._ended.is_set():
            self.mib = max(self.mib, _resident(self._pid))
            self._ended.wait(_INTERVAL)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _resident(root: int) -> float:
    """MiB: the high-water mark of a lone process, the sum of what a tree holds now."""
    pids = [root]
    for pid in pids:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue
        pids += [int(child) for child in children]
    total = 0.0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        key = "VmHWM:" if len(pids) == 1 else "VmRSS:"
        for line in status.splitlines():
            if line.startswith(key):
                total += int(line.split()[1]) / 1024
    return total
