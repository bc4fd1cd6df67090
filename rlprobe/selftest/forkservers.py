"""Start verl runs in processes that have torch and verl loaded: a second instead of a minute.

One server process for each environment, because what decides on kernels
(``ATEN_CPU_CAPABILITY``, ``MKL_CBWR``, thread counts) must stand before torch starts. The run
itself happens in a fork of it (:mod:`rlprobe.frameworks.verl.local.inprocess`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe.capture.session import ENV
from rlprobe.errors import RunError
from rlprobe.runs.launch import Started

_MODULE = "rlprobe.frameworks.verl.local.inprocess"
#: Servers kept: each holds some 700 MB.
_KEPT = 3
_END_S = 10.0


class _Server:
    """One process with verl loaded; answers one request at a time."""

    def __init__(self, environment: Mapping[str, str], log: Path, python: str) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", _MODULE],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request to its end.

        Raises:
            RunError: the server is gone; its log says why.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RunError(f"the process that loads verl ended; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the server, and a run still going on in a fork of it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class ForkServers:
    """Starts runs, and keeps the servers they were started in. A context manager.

    Args:
        logs: where the servers' own messages go.
        python: of the environment that verl and its engine are in.
    """

    def __init__(self, logs: Path, python: str = sys.executable) -> None:
        self._logs = logs
        self._python = python
        self._servers: dict[tuple[tuple[str, str], ...], _Server] = {}
        #: CPU seconds of the runs so far.
        self.cpu = 0.0

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def __call__(self, run: Started) -> tuple[int, Mapping[str, str]]:
        """See :data:`rlprobe.runs.launch.Start`.

        Raises:
            RunError: a command before the training, or the server, failed.
        """
        environment = {k: v for k, v in run.environment.items() if k != ENV}
        self._prepare(run, environment)
        answer = self._server(environment).ask(
            {
                "session": run.environment[ENV],
                "overrides": run.commands[-1][3:],
                "log": str(run.log),
            }
        )
        run.progress()
        self.cpu += float(answer["cpu"])
        return int(answer["status"]), run.environment

    def _prepare(self, run: Started, environment: Mapping[str, str]) -> None:
        for command in run.commands[:-1]:
            with run.log.open("ab") as output:
                done = subprocess.run(
                    [sys.executable, *command[1:]],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            if done.returncode:
                raise RunError(f"{' '.join(command)} failed; the log is {run.log}")

    def _server(self, environment: Mapping[str, str]) -> _Server:
        key = tuple(sorted(environment.items()))
        server = self._servers.pop(key, None)
        if server is None:
            while len(self._servers) >= _KEPT:
                self._servers.pop(next(iter(self._servers))).close()
            log = self._logs / f"{os.getpid()}-{time.time_ns()}.log"
            server = _Server(environment, log, self._python)
        self._servers[key] = server  # the one used last stands last
        return server
