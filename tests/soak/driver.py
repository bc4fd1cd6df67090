"""Runs rlprobe's commands in forks of one warm process, and kills them where it is told to.

A line of JSON on stdin is a job: {"words": [...] or "commit": {...}, "cwd", "at", "after",
"errno"}; the fork kills itself at its ``at``-th call that changes the file system, or is killed
``after`` seconds. With ``errno`` that call fails so, and so does every one of its kind after it.
The answer: {"killed", "code", "calls", "said"}. This process itself reads no table, so that no
thread of polars is lost in a fork.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import rlprobe.cli
import rlprobe.cli.compare
import rlprobe.cli.comparing
import rlprobe.cli.config
import rlprobe.cli.diagnose
import rlprobe.cli.report
import rlprobe.cli.rollouts
import rlprobe.cli.store
import rlprobe.cli.verdict
import rlprobe.compare.compare
import rlprobe.diagnose.run
import rlprobe.report.overview
import rlprobe.report.page
import rlprobe.report.plain
import rlprobe.store.exporting
import rlprobe.store.importing
import rlprobe.store.repair
from rlprobe.store.commit import commit

CALLS = ("link", "rename", "replace", "fsync", "mkdir", "chmod", "unlink", "rmdir")
_LIMIT = 60.0


class Calls:
    """Counts the calls that change the file system, and dies or fails at one of them."""

    def __init__(self, at: int, number: int | None) -> None:
        self.seen = 0
        self._at = at
        self._number = number
        self._broken: str | None = None
        for name in CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        opened = self._opened(builtins.open)
        builtins.open = io.open = opened  # type: ignore[assignment]

    def _meet(self, name: str, path: Any) -> None:
        self.seen += 1
        if self.seen == self._at and self._number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.seen == self._at:
            self._broken = name
        # a disk that is full or broken stays so; what can still be done is the others'
        if self._broken == name and self._number is not None:
            # as the kernel says it: fsync knows no name
            named = () if isinstance(path, int) else (os.fspath(path),)
            raise OSError(self._number, os.strerror(self._number), *named)

    def _counted(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._meet(name, args[0])
            return real(*args, **kwargs)

        return call

    def _opened(self, real: Any) -> Any:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, (str, bytes, os.PathLike)) and set(mode) & set("wxa+"):
                self._meet("open", file)
            return real(file, mode, *args, **kwargs)

        return call


def work(job: dict[str, Any], answer: int, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(job["cwd"])
    calls = Calls(job.get("at") or 0, job.get("errno"))
    code = 99
    try:
        if "commit" in job:
            given = job["commit"]
            commit(Path(given["scratch"]), Path(given["store"]), given["key"], given["declared"])
            code = 0
        else:
            code = rlprobe.cli.main(job["words"])
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:  # noqa: BLE001 - any end is an answer
        traceback.print_exc()
    sys.stdout.flush()
    os.write(answer, json.dumps({"code": code, "calls": calls.seen}).encode())
    os._exit(0)


def run(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            work(job, writer, output.fileno())
        os.close(writer)
        limit = job.get("after") or _LIMIT
        ready = select.select([reader], [], [], limit)[0]
        if not ready:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        _, status = os.waitpid(pid, 0)
        said = os.read(reader, 10_000)
        os.close(reader)
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    found = json.loads(said) if said else {"code": None, "calls": 0}
    hung = not ready and "after" not in job
    return {
        **found,
        "killed": os.WIFSIGNALED(status),
        "hung": hung,
        "waited": time.monotonic() - began,
        "said": text[-4000:],
    }


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
