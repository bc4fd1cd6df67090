"""Run the passes of the self-test over its cases."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rlprobe.errors import RlprobeError
from rlprobe.runs.launch import Started
from rlprobe.selftest import messages, weaken
from rlprobe.selftest.catalogue import Case
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.selftest.pipeline import Judged, Pipeline, Trial
from rlprobe.selftest.results import Result, Weaker
from rlprobe.selftest.score import FAILED, Found
from rlprobe.selftest.scoreboard import line

_log = logging.getLogger(__name__)

#: The first of the seeds that further benign runs use.
FIRST_SEED = 101


@dataclass(frozen=True)
class Passes:
    """What is done besides the first pass."""

    weakened: bool = True
    tensors: bool = False
    #: Look at the suspects of what diverged, as the workflow does.
    refined: bool = False
    #: Further benign runs in all, spread over the benign changes.
    seeds: int = 0


@dataclass(frozen=True)
class Options:
    """How the self-test is run."""

    directory: Path
    passes: Passes = Passes()
    #: Collect the alignment without needs under Ray, as ``rlprobe run`` does.
    ray: bool = True
    #: First step that changes are planted in (:attr:`Trial.step`).
    step: int = 0
    #: Cases worked on at once.
    jobs: int = 1


class _PerThread:
    """A :class:`ForkServers` for each thread that starts runs: a server answers one at a time."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._local = threading.local()
        self._made: list[ForkServers] = []
        self._guard = threading.Lock()

    def __call__(self, run: Started) -> tuple[int, dict[str, str]]:
        servers: ForkServers | None = getattr(self._local, "servers", None)
        if servers is None:
            servers = self._local.servers = ForkServers(self._logs)
            with self._guard:
                self._made.append(servers)
        status, environment = servers(run)
        return status, dict(environment)

    def close(self) -> None:
        for servers in self._made:
            servers.close()


def run(cases: Sequence[Case], options: Options) -> list[Result]:
    """Judge every case in every pass asked for; in the order of ``cases``.

    A case whose pipeline fails is a result too: its verdict is ``failed``.
    """
    logs = options.directory / "logs"
    starts = _PerThread(logs)
    seeds = _spread(cases, options.passes.seeds)
    try:
        pipeline = Pipeline(options.directory, starts, None if options.ray else starts)
        work = _Work(pipeline, options, seeds, len(cases), logs)
        return _all(cases, work, options.jobs)
    finally:
        starts.close()


def _all(cases: Sequence[Case], work: Callable[[Case], Result], jobs: int) -> list[Result]:
    # cases that share a collected run stand together: what serves them is loaded already
    order = sorted(cases, key=lambda case: json.dumps(case.declared.needs, sort_keys=True))
    results: dict[str, Result] = {}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        pending = [pool.submit(work, case) for case in order]
        try:
            for future in as_completed(pending):
                result = future.result()
                results[result.case.name] = result
        except BaseException:
            for future in pending:
                future.cancel()
            raise
    return [results[case.name] for case in cases]


def _spread(cases: Sequence[Case], runs: int) -> dict[str, list[int]]:
    """Seeds of each benign change's further runs; the same few seeds serve all of them."""
    benign = [case.name for case in cases if case.declared.is_benign]
    seeds: dict[str, list[int]] = {name: [] for name in benign}
    for index in range(runs if benign else 0):
        turn, place = divmod(index, len(benign))
        seeds[benign[place]].append(FIRST_SEED + turn)
    return seeds


class _Work:
    """All passes over one case."""

    def __init__(
        self,
        pipeline: Pipeline,
        options: Options,
        seeds: dict[str, list[int]],
        total: int,
        logs: Path,
    ) -> None:
        self._pipeline = pipeline
        self._passes = options.passes
        self._step = options.step
        self._seeds = seeds
        self._total = total
        self._logs = logs
        self._done = 0

    def __call__(self, case: Case) -> Result:
        began = time.monotonic()
        judged, error = self._judge(Trial(case, step=self._step))
        result = Result(case, _found(judged), time.monotonic() - began, error, self._step)
        if case.declared.is_benign:
            for seed in self._seeds.get(case.name, ()):
                result.seeds[seed] = _found(self._judge(Trial(case, seed=seed, step=self._step))[0])
        elif self._passes.weakened:
            result.weakened = self._weakened(result, judged)
        if self._passes.tensors:
            result.tensors = _found(self._judge(Trial(case, tensors=True, step=self._step))[0])
        if self._passes.refined and not case.declared.is_benign:
            result.refined = self._refined(Trial(case, step=self._step), judged)
        self._done += 1
        _log.info("%d of %d: %s: %s", self._done, self._total, case.name, line(result))
        return result

    def _judge(self, trial: Trial) -> tuple[Judged | None, str]:
        with messages.kept(self._logs / f"{trial.name}.log"):
            try:
                return self._pipeline.judge(trial), ""
            except RlprobeError as error:
                _log.warning("%s: %s", trial.name, error)
                return None, str(error)

    def _refined(self, trial: Trial, judged: Judged | None) -> Found:
        if judged is None:
            return Found(FAILED)
        try:
            return _found(self._pipeline.refine(trial, judged))
        except RlprobeError as error:
            _log.warning("%s: refining: %s", trial.name, error)
            return Found(FAILED)

    def _weakened(self, result: Result, full: Judged | None) -> Weaker:
        """Weaken a fault, if it was located at full strength; a miss there is a miss here."""
        if full is None or not result.right(result.full).module:
            return Weaker(1.0, result.full)
        first, record = full.diagnosis.first, full.record
        if first is None or record is None:
            return Weaker(1.0, None, "the gate, and no record, shows it")
        trials: dict[float, Judged] = {}

        def ratio_at(strength: float) -> float | None:
            judged, _ = self._judge(Trial(result.case, strength=strength, step=self._step))
            if judged is None:
                return None
            trials[strength] = judged
            return judged.ratio_of(first.stage, first.step, first.rank, record)

        ended = weaken.search(full.ratio, ratio_at)
        if not ended.reached:
            return Weaker(ended.strength, None, ended.reason)
        return Weaker(ended.strength, _found(trials.get(ended.strength, full)))


def _found(judged: Judged | None) -> Found:
    return Found(FAILED) if judged is None else Found.of(judged.diagnosis, judged.ratio)
