"""What every test may use, and how the suite is spread over processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.forked import Forked

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parent.parent

#: Directories whose tests share what is dear: one process runs all of a directory.
_TOGETHER = {"tests/slime", "tests/e2e", "tests/contract", "tests/cluster", "tests/engines"}
#: Of tests/e2e, what asks after the one alignment that is collected for all of them; the others
#: train in processes that have verl loaded, and go to another process.
_OF_THE_ALIGNMENT = {
    f"tests/e2e/test_{name}.py"
    for name in (
        *("alignment", "collector", "inprocess", "kills"),
        *("msprobe_by_hand", "ports", "train_infer", "variants"),
    )
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """A file's tests stay together, and so do those that share a collected run or a Slurm."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file in _OF_THE_ALIGNMENT:
                return "the alignment"
            directory = "/".join(file.split("/")[:2])
            return directory if directory in _TOGETHER else file

    return Together(config, log)


@pytest.fixture(scope="module", autouse=True)
def environment_as_found() -> Iterator[None]:
    """What a library exports (Megatron does) never reaches the runs of the next file."""
    found = dict(os.environ)
    yield
    for name in os.environ.keys() - found.keys():
        del os.environ[name]
    os.environ.update(found)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs programs that need torch and msprobe without importing them anew."""
    started = Forked(("torch", "msprobe.pytorch"), ROOT)
    yield started
    started.close()
