"""verl without Ray, started once and forked for every variant: seconds instead of a minute a run.

That it is the same computation as under Ray is a test of its own (test_inprocess.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe import frameworks
from rlprobe.capture import determinism
from rlprobe.capture.session import Session
from rlprobe.frameworks import RunDirectories
from rlprobe.runs.launch import session_of
from rlprobe.spec import RunSpec


@dataclasses.dataclass
class Variant:
    """What one variant left."""

    status: int
    log: str
    scratch: Path

    @property
    def dump(self) -> Path:
        return self.scratch / "dump"

    @property
    def side(self) -> Path:
        return self.scratch / "side"

    @property
    def error(self) -> str:
        """rlprobe's own message, as ``rlprobe run`` shows it."""
        lines = [line for line in self.log.splitlines() if line.startswith("rlprobe: error:")]
        assert lines, self.log[-3000:]
        return lines[-1]

    def metrics(self) -> list[dict[str, Any]]:
        """The trainer's metrics by step, timings and memory left out."""
        steps = []
        for line in (self.side / "metrics.jsonl").read_text().splitlines():
            found = json.loads(line)["metrics"]
            steps.append(
                {
                    name: value
                    for name, value in found.items()
                    if not name.startswith(("timing", "perf", "agent_loop"))
                    and "/perf/" not in name
                    and "mfu" not in name
                }
            )
        return steps


class Server:
    """A process that has verl loaded and forks a child for each variant."""

    def __init__(
        self, store: Path, spec: RunSpec, work: Path, python: str = sys.executable
    ) -> None:
        self._store = store
        self._work = work
        self._framework = frameworks.get("verl")
        places = RunDirectories(work, store / "assets")
        environment = {
            **os.environ,
            **determinism.environment("cpu"),
            **self._framework.environment(spec, places),
            **spec.environment,
        }
        self._process = subprocess.Popen(
            [python, "-m", "rlprobe.frameworks.verl.local.inprocess"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def run(
        self,
        name: str,
        spec: RunSpec,
        *overrides: str,
        config: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> Variant:
        """Run ``spec`` with further overrides and changes to its session.

        Args:
            name: of the variant's directory.
            spec: the run.
            overrides: verl's, after all others.
            config: instead of a session, what RLPROBE_CONFIG names (the collector's YAML); an
                empty text leaves the variable empty.
            environment: beside the one that the server has.
            changes: fields of the session.
        """
        scratch = self._work / name
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / "dump").mkdir(parents=True)
        (scratch / "side").mkdir()
        places = RunDirectories(scratch, self._store / "assets")
        session: Session = dataclasses.replace(session_of(spec, self._store, scratch), **changes)
        (scratch / "session.json").write_text(session.to_json())
        words = {
            w.partition("=")[0].lstrip("+"): w for w in self._framework.command(spec, places)[3:]
        }
        for override in overrides:
            words[override.partition("=")[0].lstrip("+")] = override
        log = scratch / "log"
        request = {
            "session": str(scratch / "session.json" if config is None else config),
            "overrides": list(words.values()),
            "environment": dict(environment or {}),
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Variant(answer["status"], log.read_text(errors="replace"), scratch)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            # it has answered everything; how long a machine takes to unload torch is no finding
            self._process.kill()
            self._process.wait()
