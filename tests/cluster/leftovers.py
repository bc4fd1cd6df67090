"""What a job leaves on its node."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def processes_of(directory: Path) -> list[int]:
    """Processes whose environment names a directory: a run's, whatever they were forked from."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if str(directory).encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def within(seconds: float, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.5)
