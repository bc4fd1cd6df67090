"""How long the soak lasts, and what it found: ``make soak MINUTES=30``, or a short form.

Each test gets a share of the minutes, or a number of rounds where none are given, and counts what
it did in ``figures``; they are printed at the end, those of all processes together. The shares of
all tests are a little less than two: the long form has two processes. A loss fails its test at
once.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.soak.driving import Driver
from tests.soak.world import World

_FIGURES: Counter[str] = Counter()
#: Figures that count bits that were flipped.
FLIPS = ("flips in a store", "flips in results")
#: Minutes of all tests together; 0: the short form.
MINUTES = float(os.environ.get("SOAK_MINUTES") or 0)
SEED = int(os.environ.get("SOAK_SEED") or 20251201)

Rounds = Callable[[float, int], Iterator[int]]


@pytest.fixture
def figures() -> Counter[str]:
    """Counts of what was done; those that begin with "lost" or "wrong" must stay 0."""
    return _FIGURES


@pytest.fixture
def rounds() -> Rounds:
    """Numbers of rounds: for a share of the minutes, or as many as the short form has."""

    def run(share: float, short: int) -> Iterator[int]:
        end = time.monotonic() + 60 * MINUTES * share
        number = 0
        while time.monotonic() < end if MINUTES else number < short:
            yield number
            number += 1

    return run


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """The same in every short form; in the long one, by SOAK_SEED."""
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of rounds need not wait for a disk."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    path = Path(tempfile.mkdtemp(dir=place, prefix="rlprobe-soak-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def world(memory: Path) -> World:
    """A store, results and a bundle, made once; each round works on a copy."""
    return World.make(memory / "world")


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """Runs commands in processes that it can kill."""
    driver = Driver()
    yield driver
    driver.close()


def pytest_sessionfinish(session: pytest.Session) -> None:
    told = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["soak"] = dict(_FIGURES)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what the processes of pytest-xdist did."""
    _FIGURES.update(getattr(node, "workeroutput", {}).get("soak", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _FIGURES:
        terminalreporter.section(f"soak, seed {SEED}")
        kills = sum(count for name, count in _FIGURES.items() if name.startswith("kills"))
        flips = sum(count for name, count in _FIGURES.items() if name in FLIPS)
        lines = {**_FIGURES, "kills, all": kills, "flips, all": flips}
        for name, count in sorted(lines.items()):
            terminalreporter.write_line(f"{count:>8}  {name}")
