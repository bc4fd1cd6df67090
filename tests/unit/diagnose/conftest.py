"""Alignments of a small transformer, made without a framework: collected, compared, diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlprobe.cli import main
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.judge.inputs import PlannedPair, PlannedRun, write
from rlprobe.store.commit import commit
from rlprobe.store.keys import run_key
from tests.unit.diagnose import transformer
from tests.unit.diagnose.planted import EPSILON
from tests.unit.diagnose.shown import ARGUMENTS, CHROMIUM, Open, Shown
from tests.unit.diagnose.transformer import STAGES, Device

Align = Callable[..., "Alignment"]


CAPTURE = {"engine": "light", "task": "statistics", "sketch": True}


@dataclass
class Alignment:
    """Results on disk, and their diagnosis."""

    results: Path
    store: Path
    keys: dict[str, str]

    def diagnose(self) -> Diagnosis:
        return diagnose(self.results)


@pytest.fixture(scope="session")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Device, str, str | None], Any]:
    """Runs of devices in one store, each made once."""
    root = tmp_path_factory.mktemp("runs")
    made: dict[str, str] = {}

    def collect(device: Device, role: str, parent: str | None) -> tuple[Path, str]:
        name = f"{role}-{device.split}-{device.seed}-{sorted(device.faults)}-{device.stage}"
        if name not in made or device.faults:
            scratch = root / f"scratch{len(list(root.iterdir()))}"
            transformer.run(scratch, device, role)
            declared = {"role": role, "name": scratch.name, "replay_of": parent, "device": "cpu",
                        "precision": "fp32", "capture": CAPTURE}  # fmt: skip
            declared |= device.faults.get("declared", {})
            key = run_key(declared)
            commit(scratch, root / "store", key, declared)
            made[name] = key
        return root / "store", made[name]

    return collect


@pytest.fixture
def align(collected: Callable[[Device, str, str | None], Any], tmp_path: Path) -> Align:
    """Compare a target device with the plain one; ``repeat`` adds the control."""
    return aligner(collected, tmp_path)


def aligner(collected: Callable[[Device, str, str | None], Any], directory: Path) -> Align:
    """:func:`align` with results in ``directory``, for fixtures that serve several tests."""

    def make(
        target: Device, *, repeat: bool = True, benchmark: Device | None = None, name: str = "a"
    ) -> Alignment:
        origin = benchmark or Device(seed=target.seed)
        store, collect_key = collected(origin, "benchmark", None)
        keys = {"benchmark": collect_key}
        keys["target"] = collected(target, "target", collect_key)[1]
        if repeat:
            keys["repeat"] = collected(origin, "repeat", collect_key)[1]
        results = directory / name
        pairs = {
            role: PlannedPair("benchmark", role, list(STAGES))
            for role in keys
            if role != "benchmark"
        }
        write(
            results / "alignment.json", name=name, store=store,
            runs={role: PlannedRun(key, "cpu", "fp32", list(STAGES)) for role, key in keys.items()},
            pairs=pairs,
        )  # fmt: skip
        for role in pairs:
            left, right = (store / "runs" / keys[r] for r in ("benchmark", role))
            both = sides.resolve(str(left)), sides.resolve(str(right))
            compare(*both, results / "compare" / role, Options(role, STAGES))
        return Alignment(results, store, keys)

    return make


@pytest.fixture(scope="session")
def results(
    collected: Callable[[Device, str, str | None], Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A diverged alignment with its page."""
    align = aligner(collected, tmp_path_factory.mktemp("page"))
    alignment = align(Device(split=True, faults=EPSILON.faults, stage=EPSILON.only))
    assert main(["diagnose", str(alignment.results)]) == 0
    assert main(["report", str(alignment.results)]) == 0
    return alignment.results


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def show(browser: Any) -> Iterator[Open]:
    opened: list[Shown] = []

    def show(path: Path, **context: Any) -> Shown:
        opened.append(Shown(browser, path, **context))
        return opened[-1]

    yield show
    for one in opened:
        one.context.close()
