"""One store for all end-to-end tests: what was collected once is replayed by every one of them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.config import load
from rlprobe.runs.plan import plan
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.selftest.pipeline import Pipeline
from rlprobe.spec import RunSpec
from tests.e2e.server import Server

ROOT = Path(__file__).resolve().parents[2]

_ONE_STEP = ("config/config.yaml", "config/examples/planted_fault.yaml")


@dataclasses.dataclass
class Aligned:
    """An alignment that was run with the project's own command."""

    config: Path
    store: Path
    results: Path
    output: str
    status: int

    @property
    def diagnosis(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.results / "diagnosis.json").read_text())
        return found

    def run(self, role: str) -> Path:
        """The run of a role in the store."""
        key = json.loads((self.results / "alignment.json").read_text())["runs"][role]["key"]
        return self.store / "runs" / key


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store, results and configurations of this session; a path that msprobe accepts.

    RLPROBE_E2E_DIR names a directory that is kept, so that the next call trains nothing anew.
    """
    kept = os.environ.get("RLPROBE_E2E_DIR")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        return Path(kept)
    return tmp_path_factory.mktemp("e2e")


def command(*words: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a command of the project from its root; output and errors together."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **kwargs,
    )


@pytest.fixture(scope="session")
def configure(workspace: Path) -> Callable[..., Path]:
    """A committed configuration with this session's store and results, and changes of a test."""

    def write(source: str, name: str | None = None, **changes: Any) -> Path:
        raw = yaml.safe_load((ROOT / source).read_text())
        if source in _ONE_STEP:  # the tests ask about a second step too
            raw["steps"] = {"total": 2, "start": 0, "end": 1}
        if source == "config/config.yaml":  # the planted fault is run without Ray, as it stands
            raw["ray"] = True
        raw |= {"store": str(workspace / "store"), "results": str(workspace / "results"), **changes}
        raw["name"] = name or raw["name"]
        path = workspace / f"{raw['name']}.yaml"
        path.write_text(yaml.safe_dump(raw, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="session")
def align(workspace: Path) -> Callable[[Path], Aligned]:
    """Run an alignment as ``make align`` does."""

    def run(config: Path) -> Aligned:
        done = command("workflow/align", config, env=os.environ)
        name = yaml.safe_load(config.read_text())["name"]
        return Aligned(
            config, workspace / "store", workspace / "results" / name, done.stdout, done.returncode
        )

    return run


@pytest.fixture(scope="session")
def aligned(configure: Callable[..., Path], align: Callable[[Path], Aligned]) -> Aligned:
    """The default alignment, run once."""
    result = align(configure("config/config.yaml"))
    assert result.status == 0, result.output
    return result


@pytest.fixture(scope="session")
def faulty(
    aligned: Aligned, configure: Callable[..., Path], align: Callable[[Path], Aligned]
) -> Aligned:
    """The planted fault; it shares the default's benchmark and repeat."""
    result = align(configure("config/examples/planted_fault.yaml"))
    assert result.status == 0, result.output
    return result


@pytest.fixture(scope="session")
def runs(aligned: Aligned) -> dict[str, RunSpec]:
    """The default alignment's runs, as planned."""
    return plan(load(aligned.config), {})


@pytest.fixture(scope="session")
def verl(aligned: Aligned, runs: dict[str, RunSpec], workspace: Path) -> Iterator[Server]:
    """verl in one process, with the benchmark's environment."""
    server = Server(aligned.store, runs["benchmark"], workspace / "variants")
    yield server
    server.close()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """Starts runs in processes that have verl loaded: loaded once for all tests of all files."""
    with ForkServers(tmp_path_factory.mktemp("servers")) as started:
        yield started


@pytest.fixture(scope="session")
def pipeline(servers: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """The self-test's pipeline without Ray; what it collected serves the trials of all files."""
    return Pipeline(tmp_path_factory.mktemp("pipeline"), servers, servers)
