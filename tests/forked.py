"""Programs that import torch and msprobe, each in a fork of one process that has imported both.

Importing them costs four seconds of processor time, and many tests need a process of their own
because a process has one debugger of msprobe's. What a program patches, its working directory and
its environment end with its fork. Whatever is read from the environment when torch is imported is
the tests' own: a program that must change that needs a process from the start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SERVER = """
import importlib, json, os, runpy, sys, traceback

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what an import prints is no answer
for module in sys.argv[1:]:
    importlib.import_module(module)


def run(request):
    with open(request["output"], "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = [request["program"], *request["words"]]
    sys.path.insert(0, os.path.dirname(request["program"]))
    status = 0
    try:
        runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    _, status = os.waitpid(child, 0)
    answers.write(f"{os.waitstatus_to_exitcode(status)}\\n")
    answers.flush()
"""


class Forked:
    """The process, started with the first program; one program at a time."""

    def __init__(self, modules: tuple[str, ...], root: Path) -> None:
        self._modules = modules
        self._root = root
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, program: Path | str, *words: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program's file, or its text, to its end; output and errors together."""
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            if isinstance(program, str):
                (place / "program.py").write_text(program)
                program = place / "program.py"
            request = {
                "program": str(program),
                "words": [str(word) for word in words],
                "env": dict(env or {}),
                "cwd": str(place),
                "output": str(place / "output"),
            }
            server = self._started()
            assert server.stdin is not None and server.stdout is not None
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            status = server.stdout.readline()
            assert status, "the process that forks has ended"
            output = (place / "output").read_text(errors="replace")
        return subprocess.CompletedProcess([str(program)], int(status), output, "")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate(timeout=60)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            command: list[str] = [sys.executable, "-c", _SERVER, *self._modules]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(self._root)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process
