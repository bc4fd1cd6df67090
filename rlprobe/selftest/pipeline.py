"""The real pipeline on one planted change: run, commit, compare, diagnose.

Nothing here is of the self-test's own but how runs are started: the functions are those behind
``rlprobe run``, ``compare`` and ``diagnose``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.documents import seal
from rlprobe.errors import ConfigError
from rlprobe.files import replace_text
from rlprobe.judge import tables
from rlprobe.judge.inputs import NAME as PLAN
from rlprobe.judge.inputs import Results
from rlprobe.refine import decide, refined, region, substitution, suspects
from rlprobe.roles import BENCHMARK, REPEAT, TARGET, is_perturbed
from rlprobe.rollouts import hdf5
from rlprobe.rollouts.model import Ragged
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.launch import Start, launch
from rlprobe.runs.plan import pairs, plan
from rlprobe.runs.suspects import forced, refining, substituted
from rlprobe.selftest import alignments, stamp
from rlprobe.selftest.catalogue import Case
from rlprobe.spec import RunSpec
from rlprobe.store.read import Run

_log = logging.getLogger(__name__)
#: Tensors that a refining run of the tiny model may write.
_BUDGET_MIB = 64


@dataclass(frozen=True)
class Trial:
    """How one case is run: which rollouts, what is kept, how strong the fault is."""

    case: Case
    strength: float = 1.0
    tensors: bool = False
    seed: int = 1
    #: First step that the change is planted in; each later one begins from the benchmark's state.
    step: int = 0

    @property
    def needs(self) -> dict[str, Any]:
        """What the alignment must have."""
        needs = dict(self.case.declared.needs)
        if self.step:
            needs |= {"steps": max(needs.get("steps", 1), self.step + 1), "rejoin": True}
        return needs

    @property
    def name(self) -> str:
        """Of the alignment, hence of its results directory."""
        parts = [self.case.name]
        if self.step:
            parts.append(f"step{self.step}")
        if self.tensors:
            parts.append("tensors")
        if self.seed != 1:
            parts.append(f"seed{self.seed}")
        if self.strength != 1.0:
            parts.append(f"strength{self.strength:.4e}".replace("+", ""))
        return ".".join(parts)

    @property
    def alignment(self) -> str:
        """What is collected for it and for others like it, in words."""
        needs = [f"{key} {value}" for key, value in sorted(self.needs.items())]
        further = [*(["tensors kept"] if self.tensors else []), f"seed {self.seed}"]
        return ", ".join([*needs, *further])


@dataclass(frozen=True)
class Judged:
    """What the pipeline said of a trial."""

    diagnosis: Diagnosis
    directory: Path
    seconds: float

    @property
    def record(self) -> str | None:
        """The record where the two sides part first."""
        first = self.diagnosis.noise.get("first")
        return None if first is None else str(first["record"])

    @property
    def ratio(self) -> float | None:
        """Its error in multiples of its floor; the largest of all judged where none parts."""
        first = self.diagnosis.noise.get("first")
        if first is not None:
            return _number(first["ratio"])
        found = [
            number
            for stage in self.diagnosis.noise.get("stages", {}).values()
            if (number := _number(stage["largest_ratio"])) is not None
        ]
        return max(found, default=None)

    def ratio_of(self, stage: str, step: int, rank: int, record: str) -> float | None:
        """A record's error in multiples of its floor; None where it has none.

        Raises:
            DumpError: the stage's judged table is missing or damaged.
        """
        table = tables.read_table(Results.open(self.directory), stage)
        # a result of the stage is key data, of no rank
        mine = pl.col("rank").is_null() | (pl.col("rank") == rank)
        rows = table.filter((pl.col("step") == step) & mine & (pl.col("name") == record))
        return _number(rows.get_column("excess").max())


def _as_planted(target: RunSpec, trial: Trial) -> RunSpec:
    return dataclasses.replace(target, fault_strength=trial.strength, fault_step=trial.step)


def _number(value: Any) -> float | None:
    """A number as a diagnosis writes it: infinities are text."""
    return None if value is None else float(value)


def _check_lengths(trial: Trial, run: Path) -> None:
    """A fault that needs responses of several lengths shows nothing where they are all alike.

    Raises:
        ConfigError: they are.
    """
    if trial.needs.get("response_lengths") != "varied":
        return
    lengths = {
        int(length)
        for path in hdf5.steps(run / "rollouts").values()
        for length in _lengths(hdf5.read(path).tensors["response_mask"])
    }
    if len(lengths) < 2:
        raise ConfigError(
            f"{trial.name} needs responses of varied lengths; with seed {trial.seed} all have "
            f"{min(lengths, default=0)} tokens: give the model or the seed another value"
        )


def _lengths(mask: np.ndarray | Ragged) -> np.ndarray:
    if isinstance(mask, Ragged):
        return np.diff(mask.offsets)
    return np.asarray(mask.sum(axis=1))


class Pipeline:
    """Runs trials, and keeps what they share.

    Args:
        directory: ``store/`` and the trials' results go below it.
        start: starts replays, and collecting runs but the first kind.
        collect: starts the benchmark and the repeat of the alignment without needs; None: as
            ``rlprobe run`` does, under Ray.
    """

    def __init__(self, directory: Path, start: Start, collect: Start | None) -> None:
        self._directory = Path(os.path.relpath(directory))
        self._store = self._directory / "store"
        self._start = start
        self._collect = collect
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def judge(self, trial: Trial) -> Judged:
        """Run a trial to its diagnosis, which is written beside its comparisons.

        What is there already, of the same runs and by the same code, is taken as it is.

        Raises:
            ConfigError: the case needs what there is not.
            RunError: a run failed.
            DumpError, StoreError: what a run left is damaged.
        """
        began = time.monotonic()
        jobs = self._jobs(trial)
        directory = Path(jobs.results)
        repeat = self._collected(trial, jobs)
        launch(jobs.runs[TARGET], self._store, start=self._start)
        made_from = stamp.of(jobs.runs)
        found = stamp.kept(directory, made_from)
        if found is None:
            found = self._diagnosed(jobs, repeat, directory)
            stamp.write(directory, made_from)
        return Judged(found, directory, time.monotonic() - began)

    def refine(self, trial: Trial, judged: Judged) -> Judged:
        """Look at the suspects of a divergence, as the workflow does after it.

        Raises:
            RunError: a refining run failed.
            DumpError, StoreError: what it left is damaged.
        """
        if judged.diagnosis.verdict != diagnosis.DIVERGED:
            return judged
        began = time.monotonic()
        directory = judged.directory
        if not stamp.is_refined(directory):
            shutil.rmtree(directory / "refine", ignore_errors=True)
            self._look_again(trial, judged)
            stamp.write_refined(directory)
        seconds = judged.seconds + time.monotonic() - began
        return Judged(diagnosis.answer(directory), directory, seconds)

    def _look_again(self, trial: Trial, judged: Judged) -> None:
        directory = judged.directory
        plan_of = suspects.find(directory, _BUDGET_MIB)
        suspects.write(directory, plan_of)
        if plan_of.suspects is None:
            return
        specs = refining(self._jobs(trial).alignment, plan_of.suspects)
        specs[TARGET] = _as_planted(specs[TARGET], trial)
        store = self._store.absolute()
        sides = [
            Run.open(store, launch(spec, self._store, start=self._start).parent.name)
            for spec in specs.values()
        ]
        found = refined.refine(plan_of, plan_of.suspects, *sides)
        refined.write(directory, found)
        self._substitute(trial, directory, plan_of, sides[0].key)
        if decide.is_open(directory, plan_of, found):
            self._force(trial, directory, plan_of, sides[0].key)
        sharper = decide.sharpened(directory, judged.diagnosis)
        text = json.dumps(sharper.as_dict(), indent=1, allow_nan=False)
        replace_text(directory / diagnosis.REFINED / diagnosis.NAME, text)

    def _substitute(self, trial: Trial, directory: Path, found: suspects.Plan, kept: str) -> None:
        """The target once more, with the benchmark's outputs in the suspect's place."""
        assert found.suspects is not None
        spec = substituted(self._jobs(trial).alignment, found.suspects, kept)
        if spec is None:
            return
        spec = dataclasses.replace(spec, fault_strength=trial.strength)
        key = launch(spec, self._store, start=self._start).parent.name
        run = Run.open(self._store.absolute(), key)
        after = substitution.look(directory, found, found.suspects, run)
        substitution.write_found(directory, after)

    def _force(self, trial: Trial, directory: Path, found: suspects.Plan, kept: str) -> None:
        """The target once more, with every block given the benchmark's numbers."""
        assert found.suspects is not None
        spec = forced(self._jobs(trial).alignment, found.suspects, kept)
        if spec is None:
            return
        spec = dataclasses.replace(spec, fault_strength=trial.strength)
        key = launch(spec, self._store, start=self._start).parent.name
        rows = suspects.rows(directory, found.suspects)
        run = Run.open(self._store.absolute(), key)
        region.write(directory, region.look(run, found.suspects, rows))

    def _diagnosed(self, jobs: Jobs, repeat: Path, directory: Path) -> Diagnosis:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(repeat, directory / "compare" / REPEAT, copy_function=os.link)
        self._compare(jobs, TARGET, directory / "compare" / TARGET)
        replace_text(directory / PLAN, json.dumps(seal.sealed(jobs.described()), indent=1))
        found = diagnose(directory)
        text = json.dumps(found.as_dict(), indent=1, allow_nan=False)
        replace_text(directory / diagnosis.NAME, text)
        return found

    def _jobs(self, trial: Trial) -> Jobs:
        alignment = alignments.alignment(
            trial.needs,
            store=str(self._store),
            results=str(self._directory / "results"),
            name=trial.name,
            tensors=trial.tensors,
            seed=trial.seed,
            fault=trial.case.reference,
        )
        runs = plan(alignment, environ={})
        runs[TARGET] = _as_planted(runs[TARGET], trial)
        return Jobs(alignment, runs, pairs(runs))

    def _collected(self, trial: Trial, jobs: Jobs) -> Path:
        """Make the benchmark and the repeat, and compare them, once for all that share them."""
        runs = jobs.runs
        plain = not (trial.needs or trial.tensors or trial.seed != 1)
        start = self._collect if plain else self._start
        key = runs[REPEAT].key
        directory = self._directory / "repeats" / f"{key[:16]}-{stamp.code()[:16]}"
        with self._lock(key):
            if not all(self._is_stored(runs[role]) for role in (BENCHMARK, REPEAT)):
                _log.info("%s: collecting a new alignment (%s)", trial.name, trial.alignment)
            collected = launch(runs[BENCHMARK], self._store, start=start)
            _check_lengths(trial, collected.parent)
            for role in (REPEAT, *filter(is_perturbed, runs)):
                launch(runs[role], self._store, start=start)
            if not directory.exists():
                # complete, or not there: what was interrupted is made again
                unfinished = directory.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                self._compare(jobs, REPEAT, unfinished)
                unfinished.rename(directory)
        return directory

    def _is_stored(self, run: RunSpec) -> bool:
        return (self._store / "runs" / run.key / "manifest.json").exists()

    def _lock(self, key: str) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(key, threading.Lock())

    def _compare(self, jobs: Jobs, pair: str, out: Path) -> None:
        left, right = (self._side(jobs.runs, role) for role in jobs.pairs[pair])
        options = Options(pair=pair, stages=jobs.stages(pair), coverage=jobs.alignment.coverage)
        compare(left, right, out, options)

    def _side(self, runs: Mapping[str, RunSpec], role: str) -> sides.Side:
        return sides.resolve(str(self._store / "runs" / runs[role].key), None)
