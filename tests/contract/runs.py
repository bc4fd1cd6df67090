"""The runs behind the contract's cells: each is made once, when a cell first asks for it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlprobe import frameworks
from rlprobe.config import load
from rlprobe.frameworks import RunDirectories
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec
from tests.e2e.server import Server, Variant

ROOT = Path(__file__).resolve().parents[2]


class Runs:
    """Runs of real verl on the default configuration's model and data.

    Args:
        work: a directory for everything; runs found there are not made again.
        version: of verl.
        python: of the environment that has it.
    """

    def __init__(
        self, work: Path, version: str | None = None, python: str = sys.executable
    ) -> None:
        self.work = work
        self._python = python
        config = work / "config.yaml"
        work.mkdir(parents=True, exist_ok=True)
        raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        raw |= {"store": str(work / "store"), "results": str(work / "results"), "ray": True}
        raw["steps"] = {"total": 2, "start": 0, "end": 1}
        raw["framework_version"] = version or raw["framework_version"]
        config.write_text(yaml.safe_dump(raw))
        self.specs: dict[str, RunSpec] = plan(load(config), {})
        self.spec = self.specs["benchmark"]
        self.framework = frameworks.get("verl")
        self._places = RunDirectories(work, work / "store/assets")
        self._server: Server | None = None
        self._done: dict[str, Variant] = {}

    def __enter__(self) -> Runs:
        for command in self.framework.prepare(self.spec, self._places):
            subprocess.run([sys.executable, *command[1:]], check=True, cwd=ROOT)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._server is not None:
            self._server.close()

    def collector(
        self, name: str, *overrides: str, may_fail: bool = False, **options: Any
    ) -> Variant:
        """verl without Ray, with a collector file of these options."""
        config = self.write(name, **options)
        return self.once(name, lambda: self._fork(name, config, overrides), may_fail)

    def light(self, name: str, config: Path, *overrides: str) -> Variant:
        """As :meth:`collector`, with the light engine in msprobe's place."""
        from rlprobe.capture import collector
        from rlprobe.frameworks.verl.host import plan as stages

        words = self.framework.command(self.spec, self._places)[3:]
        asked = collector.load(
            config,
            directory=self.work,
            framework="verl",
            available=stages.stages_of(stages.from_overrides([*words, *overrides])),
        )
        assert asked is not None
        capture = dataclasses.replace(asked.capture, engine="light")
        changes: dict[str, Any] = {"capture": capture, "expected_stages": asked.expected_stages}
        quiet: dict[str, Any] = {"deterministic": False, "replay": None, "collect_rollouts": True}
        return self.once(
            name,
            lambda: self.server.run(name, self.spec, *overrides, **changes, **quiet),
        )

    def bare(self, name: str, *overrides: str) -> Variant:
        """verl without Ray, hooks loaded and nothing asked of them."""
        return self.once(name, lambda: self._fork(name, "", overrides))

    def session(
        self, name: str, *overrides: str, role: str = "benchmark", **changes: Any
    ) -> Variant:
        """verl without Ray, with an alignment's session and changes to it."""

        def run() -> Variant:
            return self.server.run(name, self.specs[role], *overrides, **changes)

        return self.once(name, run)

    def ray(
        self,
        name: str,
        *overrides: str,
        script: Path | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Variant:
        """A plain verl command line under Ray with the collector's field, in its own directory."""

        def run() -> Variant:
            scratch = self.work / "variants" / name
            scratch.mkdir(parents=True, exist_ok=True)
            places = RunDirectories(scratch, self.work / "store/assets")
            self.write(name, **options)
            words = _merged(self.framework.command(self.spec, places)[3:], overrides)
            start = [self._python, "-m", "verl.trainer.main_ppo"]
            if script is not None:
                start = [self._python, str(script)]
            env = {**os.environ, **self.framework.environment(self.spec, places)}
            env["VERL_USE_EXTERNAL_MODULES"] = "rlprobe.frameworks.verl.cpu"
            env.pop("RLPROBE_CONFIG", None)
            log = scratch / "log"
            with log.open("wb") as file:
                done = subprocess.run(
                    [*start, *words, "+ascend_precision_collector=precision_collector.yaml"],
                    cwd=scratch,
                    env={**env, **(environment or {})},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            return Variant(done.returncode, log.read_text(errors="replace"), scratch)

        return self.once(name, run)

    def once(self, name: str, run: Callable[[], Variant], may_fail: bool = False) -> Variant:
        """The run of this name; made now unless it was."""
        if name not in self._done:
            self._done[name] = run()
        variant = self._done[name]
        assert may_fail or variant.status == 0, f"{name}: {_end(variant)}"
        return variant

    def write(self, name: str, **options: Any) -> Path:
        """The collector file of a run; ``dump_path`` is its ``dump`` unless given."""
        place = self.work / "variants" / f"{name}.yaml"
        if "dump_path" not in options:
            options["dump_path"] = str(self.work / "variants" / name / "dump")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(yaml.safe_dump({"precision_collector": options}))
        own = self.work / "variants" / name / "precision_collector.yaml"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(place.read_text())
        return place

    @property
    def server(self) -> Server:
        """verl, loaded once."""
        if self._server is None:
            self._server = Server(
                self.work / "store", self.spec, self.work / "variants", python=self._python
            )
        return self._server

    def _fork(self, name: str, config: Path | str, overrides: tuple[str, ...]) -> Variant:
        return self.server.run(name, self.spec, *overrides, config=config)


def _merged(words: list[str], overrides: tuple[str, ...]) -> list[str]:
    """Hydra refuses a key that is given twice."""
    merged = {word.partition("=")[0].lstrip("+~"): word for word in words}
    for word in overrides:
        merged[word.partition("=")[0].lstrip("+~")] = word
    return list(merged.values())


def _end(variant: Variant) -> str:
    said = [line for line in variant.log.splitlines() if line.startswith("rlprobe: error:")]
    return said[-1] if said else f"status {variant.status}\n{variant.log[-2500:]}"


@dataclasses.dataclass(frozen=True)
class Tree:
    """What a collecting run left under its ``dump_path``."""

    root: Path

    def stages(self) -> dict[str, set[str]]:
        """Stages with model layers, and their steps."""
        found: dict[str, set[str]] = {}
        for path in self.root.glob("*/step*/rank*/dump.json"):
            found.setdefault(path.parts[-4], set()).add(path.parts[-3])
        return found

    def records(
        self, stage: str, step: int = 0, rank: int = 0, name: str = "dump"
    ) -> dict[str, Any]:
        """A stage's records."""
        path = self.root / stage / f"step{step}" / f"rank{rank}" / f"{name}.json"
        data: dict[str, Any] = json.loads(path.read_text())["data"]
        return data

    def key(self, name: str, step: int = 0, rank: int = 0) -> list[np.ndarray[Any, Any]]:
        """Key data of every micro-step, in order."""
        place = self.root / "data" / name / f"step{step}" / f"rank{rank}"
        micro = sorted(place.iterdir(), key=lambda path: int(path.name.removeprefix("micro_step")))
        return [np.load(path / f"{name}.npy", allow_pickle=False) for path in micro]
