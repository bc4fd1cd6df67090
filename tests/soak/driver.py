"""Runs rlprobe's commands in forks of one warm process, and kills them where it is told to.

A line of JSON on stdin is a job: {"words": [...] or "commit": {...}, "cwd", "at", "after"}; the
fork kills itself at its ``at``-th call that changes the file system, or is killed ``after``
seconds. The answer: {"killed", "code", "calls", "said"}. This process itself reads no table, so
that no thread of polars is lost in a fork.
"""

from __future__ import annotations

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
import rlprobe.cli.diagnose
import rlprobe.cli.report
import rlprobe.cli.store
import rlprobe.compare.compare
import rlprobe.diagnose.run
import rlprobe.report.page
import rlprobe.store.exporting
import rlprobe.store.importing
import rlprobe.store.repair
from rlprobe.store.commit import commit

CALLS = ("link", "rename", "replace", "fsync", "mkdir", "chmod", "unlink", "rmdir")
_LIMIT = 60.0


def count_calls(at: int) -> list[int]:
    """Count the calls that change the file system; die at one of them."""
    seen = [0]

    def counted(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen[0] += 1
            if seen[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        counted(name)
    return seen


def work(job: dict[str, Any], answer: int, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(job["cwd"])
    seen = count_calls(job.get("at") or 0)
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
    os.write(answer, json.dumps({"code": code, "calls": seen[0]}).encode())
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
