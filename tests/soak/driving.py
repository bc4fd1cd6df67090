"""The test's side of ``driver.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    killed: bool
    code: int | None
    #: Calls that changed the file system.
    calls: int
    said: str
    hung: bool

    @property
    def broke(self) -> bool:
        """Whether it ended in a traceback, or not at all."""
        return self.hung or "Traceback" in self.said or self.code == 99


class Driver:
    """Commands in processes that die where they are told to."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("driver.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(
        self,
        *words: object,
        cwd: Path,
        at: int | None = None,
        after: float | None = None,
        errno: int | None = None,
        commit: dict[str, Any] | None = None,
    ) -> Ended:
        """Run a command of rlprobe, or commit scratch space.

        Args:
            words: the command line.
            cwd: where.
            at: number of the call that changes the file system at which it dies.
            after: seconds until it is killed.
            errno: how that call fails, instead of killing it, and all such calls after it.
            commit: scratch, store, key and declared, instead of words.
        """
        job: dict[str, Any] = {"cwd": str(cwd)}
        job |= {"commit": commit} if commit else {"words": [str(word) for word in words]}
        more = {"at": at, "after": after, "errno": errno}
        job |= {name: value for name, value in more.items() if value}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        return Ended(*(found[name] for name in ("killed", "code", "calls", "said", "hung")))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
