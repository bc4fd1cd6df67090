"""The diagnosis of an alignment."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import polars as pl

from rlprobe.diagnose import curves, first, noise, rollout, sentence, strip, unheld
from rlprobe.diagnose.cause import classify
from rlprobe.diagnose.cause.classify import of_gate
from rlprobe.diagnose.diagnosis import (
    CAVEAT,
    SHUT,
    Cause,
    Diagnosis,
    First,
    StageResult,
    Values,
    Verdict,
)
from rlprobe.diagnose.gate import Gate, check, dumps
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.diagnose.gate.extent import coverage
from rlprobe.diagnose.gate.steps import merged
from rlprobe.judge import (
    analysis,
    basis,
    decisive,
    extent,
    forced,
    multiples,
    outline,
    routed,
    tables,
)
from rlprobe.judge import curves as judge_curves
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.curves import NOT_JUDGED, Curve
from rlprobe.judge.extent import Extents
from rlprobe.judge.inputs import Results, require
from rlprobe.judge.judge import Kept, judge
from rlprobe.roles import BENCHMARK, HIGH_PRECISION, REPEAT, REPEAT_TARGET, TARGET
from rlprobe.said import Said
from rlprobe.store.read import Run

_log = logging.getLogger(__name__)


def diagnose(directory: Path) -> Diagnosis:
    """Judge an alignment, and write its judged tables (:mod:`rlprobe.judge.tables`).

    Args:
        directory: RESULTS_DIR with ``alignment.json`` and ``compare/``, or what ``rlprobe compare``
            left of two dumps.

    Raises:
        DumpError, StoreError: a file or run is missing or damaged.
        OSError: the tables cannot be written.
    """
    results = Results.open(directory)
    found = examine(results, Kept())
    for item in found.gate.items:
        _log.debug("gate: %s %s: %s", item.item, item.state, item.evidence)
    made = found.diagnosis(tables.write(results, found.step, found.tables))
    if results.of_dumps:
        return made
    gaps = rollout.of(found.benchmark, found.target, found.step.number)
    return msgspec.structs.replace(made, rollout=gaps.as_values())


def examine(results: Results, kept: Kept) -> Examined:
    """Judge an alignment; nothing is written.

    Args:
        results: the alignment.
        kept: what need not be looked at again, and where what is looked at goes.

    Raises:
        DumpError, StoreError: a file or run is missing or damaged.
    """
    benchmark, target = require(results, BENCHMARK), require(results, TARGET)
    of = basis.of(results)
    every = [judge(results, number, kept) for number in judged_steps(results, benchmark, target)]
    judged = tables.tables(results, every)
    found = curves.find(results, every)
    extents = _extents(results, judged, found)
    step, gate = _decisive(results, benchmark, target, every, extents)
    controls = len(curves.perturbed(results))
    return Examined(
        results, benchmark, target, every, step, gate, of, judged, extents, found.curves, controls
    )


def _decisive(
    results: Results, benchmark: Run, target: Run, every: Sequence[Step], extents: Extents
) -> tuple[Step, Gate]:
    """The judged step that decides: the first that parts or is not comparable, else the first.

    With it the gate of all judged steps up to it, as one.
    """
    controls = {
        role: run
        for role in (REPEAT, REPEAT_TARGET, HIGH_PRECISION)
        if (run := results.run(role)) is not None
    }
    gates: dict[int, Gate] = {}
    for step in every:
        if results.of_dumps:
            gate = dumps.check(results, step, extents)
        else:
            gate = check(Evidence(results, benchmark, target, controls, step, extents))
        gates[step.number] = gate
        if gate.is_shut or analysis.first_of(step) is not None:
            return step, merged(gates)
    return every[0], merged(gates)


def judged_steps(results: Results, benchmark: Run, target: Run) -> list[int]:
    """The captured steps that are judged, from 0: at least one.

    The first that both sides captured; later ones differ by what updates left, except where the
    target began each from the benchmark's state.

    Raises:
        DumpError: a table of two dumps is damaged.
    """
    if results.of_dumps:
        return [outline.first_step(results)]
    common = sorted(set(benchmark.manifest.steps) & set(target.manifest.steps))
    steps = common or sorted(benchmark.manifest.steps) or [0]
    return steps if target.is_joined else steps[:1]


def _extents(results: Results, judged: dict[str, pl.DataFrame], found: curves.Metrics) -> Extents:
    """How much was judged, of records, key data and what the trainer reports."""
    runs = [run for role in (BENCHMARK, TARGET) if (run := results.run(role)) is not None]
    held = {c.metric for c in found.curves if c.verdict != NOT_JUDGED and c.by == "controls"}
    return extent.with_metrics(extent.of(judged), *runs, judged=held, at_steps=found.held)


@dataclass(frozen=True)
class Examined:
    """An alignment whose steps were judged, and which of them decides."""

    results: Results
    benchmark: Run
    target: Run
    every: Sequence[Step]
    #: The step that decides, and the gate up to it.
    step: Step
    gate: Gate
    #: What it was made from (:func:`basis.of`).
    of: dict[str, str]
    #: The judged tables by stage, and how much they judge.
    tables: dict[str, pl.DataFrame]
    extents: Extents
    #: Every metric of the trainer over its steps, and how many perturbed controls there were.
    curves: list[Curve]
    controls: int

    def diagnosis(self, summary: str | None) -> Diagnosis:
        """What follows from it.

        Args:
            summary: digest of the judged tables' summary; None where they were not written.
        """
        return msgspec.structs.replace(self._found(), judged=summary)

    def _found(self) -> Diagnosis:
        if self.gate.is_shut:
            return self._not_comparable()
        diverged = analysis.first_of(self.step)
        if diverged is not None:
            return self._diverged(diverged)
        gone = curves.left(self.curves)
        return self._aligned() if gone is None else self._left(gone)

    @property
    def verdict(self) -> Verdict:
        """The verdict alone, without where and why."""
        if self.gate.is_shut:
            return "not_comparable"
        parts = analysis.first_of(self.step) is not None or curves.left(self.curves) is not None
        return "diverged" if parts else "aligned"

    @property
    def unheld(self) -> dict[str, int]:
        """What the target recorded besides (:mod:`rlprobe.diagnose.unheld`); of two dumps there is
        no run that says it."""
        return {} if self.results.of_dumps else unheld.of(self.target)

    def _aligned(self) -> Diagnosis:
        cells = self._strip_of_all()
        nearest = max(map(noise.nearest, self.every))
        unused = sum(finding.unused for step in self.every for finding in step.findings.values())
        numbers = [step.number for step in self.every]
        caveats = sum(item.state == CAVEAT for item in self.gate.items)
        later = sum(number > numbers[-1] for number in self.target.manifest.steps)
        text = sentence.aligned(self.results.plan, cells, nearest, unused, caveats, numbers, later)
        return self._said("aligned", text, cells, noise.of(self.results, self.every, None))

    def _diverged(self, diverged: Finding) -> Diagnosis:
        cells = strip.of(self.results, self.target, self.step, diverged, comparable=True)
        before = [other.number for other in self.every if other.number < self.step.number]
        diverged = multiples.measured(self.results, self.step.number, diverged)
        profile = first.profile(self.results, self.step, diverged)
        cause = classify(self.step, diverged, _world_size(self.target), profile)
        if not self.results.of_dumps:
            cause = first.with_refusal(diverged, cause)
        cause = first.with_block(self.results, self.step, diverged, cause)
        cause = first.with_phases(self.step, diverged, cause, self.benchmark)
        cause = first.with_unjudged(self.step, diverged, cause)
        where = first.of(self.results, self.step, diverged, self.benchmark)
        assert diverged.origin is not None
        row = diverged.origin.row
        text = sentence.diverged(
            self.results.plan, where, self._trainers(self.step.number), decisive.of(row),
            row.get("excess"), cause, before,
        )  # fmt: skip
        said = noise.of(self.results, [self.step], diverged)
        return self._said("diverged", text, cells, said, where, cause)

    def _left(self, gone: Curve) -> Diagnosis:
        """No record parts, and the trainer's curves do."""
        number = gone.step or 0
        text = sentence.left(
            self.results.plan, number, self._trainers(number), gone, judge_curves.said(gone)
        )
        where, cause = curves.first(gone), curves.cause(self.curves, gone)
        said = noise.of(self.results, [self.step], None)
        return self._said("diverged", text, self._strip_of_all(), said, where, cause)

    def _not_comparable(self) -> Diagnosis:
        cells = strip.of(self.results, self.target, self.step, None, comparable=False)
        shut = [item for item in self.gate.items if item.state == SHUT]
        text = sentence.not_comparable(self.results.plan, shut)
        said = noise.of(self.results, [self.step], None)
        found = self.gate.shut
        if found is None:
            return self._said("not_comparable", text, cells, said)
        where = first.of_gate(found, self.step, self.benchmark)
        return self._said("not_comparable", text, cells, said, where, of_gate(found))

    def _said(
        self,
        verdict: Verdict,
        text: Said,
        cells: list[StageResult],
        of_noise: Values,
        where: First | None = None,
        cause: Cause | None = None,
    ) -> Diagnosis:
        """The diagnosis, with the curves and how much was judged behind the verdict's sentence."""
        of_curves = sentence.of_curves(self.curves, self.controls)
        of_curves += sentence.of_choices(forced.of_step(self.step))
        return Diagnosis(
            verdict=verdict,
            sentence=text + of_curves + sentence.extent(extent.total(self.extents)),
            gate=self.gate.items,
            first=where,
            cause=cause,
            coverage=coverage(self.results),
            noise=of_noise,
            stages=cells,
            extent=self.extents,
            curves=self.curves,
            routing=routed.routed(self.results, self.step.number),
            unheld=self.unheld,
            of=self.of,
        )

    def _strip_of_all(self) -> list[StageResult]:
        return strip.of_all(
            [
                strip.of(self.results, self.target, step, None, comparable=True)
                for step in self.every
            ]
        )

    def _trainers(self, step: int) -> int | None:
        """The trainer's number of a captured step, where it is known."""
        begin = self.target.manifest.first_step
        return None if begin is None else begin + step


def _world_size(run: Run) -> int:
    return max((process.world_size for process in run.manifest.layout), default=1)
