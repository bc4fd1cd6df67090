"""The diagnosis of an alignment."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rlprobe import stages
from rlprobe.diagnose import curves, sentence
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
)
from rlprobe.diagnose.gate import Gate, check, dumps
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.diagnose.gate.extent import coverage
from rlprobe.diagnose.gate.steps import merged
from rlprobe.errors import ReplayError
from rlprobe.judge import (
    analysis,
    compared,
    decisive,
    extent,
    multiples,
    noise,
    outline,
    tables,
    tokens,
)
from rlprobe.judge import curves as judge_curves
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.curves import NOT_JUDGED, Curve
from rlprobe.judge.extent import Extents
from rlprobe.judge.floors import R_LIMIT, REPEAT_FACTOR
from rlprobe.judge.inputs import Results, require
from rlprobe.judge.judge import judge
from rlprobe.roles import BENCHMARK, HIGH_PRECISION, REPEAT, REPEAT_TARGET, TARGET
from rlprobe.rollouts import hdf5
from rlprobe.said import Said, say
from rlprobe.store.read import Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """The judged tables of an alignment: their summary's digest, and how much they judge."""

    summary: str
    extents: Extents
    #: Every metric of the trainer over its steps, and how many perturbed controls there were.
    curves: list[Curve] = field(default_factory=list)
    controls: int = 0

    def said(self) -> Said:
        """What stands after a verdict: the curves, and how much was judged."""
        of_curves = sentence.of_curves(self.curves, self.controls)
        return of_curves + sentence.extent(extent.total(self.extents))


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
    benchmark, target = require(results, BENCHMARK), require(results, TARGET)
    every = [judge(results, number) for number in judged_steps(results, benchmark, target)]
    judged = tables.tables(results, every)
    curves_found = [] if results.of_dumps else curves.find(results, every[0])
    extents = _extents(results, judged, curves_found)
    step, gate = _decisive(results, benchmark, target, every, extents)
    how_much = Judged(
        tables.write(results, step, judged),
        extents,
        curves_found,
        len(curves.perturbed(results)),
    )
    for item in gate.items:
        _log.debug("gate: %s %s: %s", item.item, item.state, item.evidence)
    diverged = None if gate.is_shut else analysis.first_of(step)
    if gate.is_shut:
        strip = _strip(results, target, step, diverged, gate)
        return _not_comparable(results, gate, step, strip, benchmark, how_much)
    gone = curves.left(curves_found)
    if diverged is None and gone is not None:
        strip = _of_all([_strip(results, target, one, None, gate) for one in every])
        return _left(results, step, strip, gate, gone, target, how_much)
    if diverged is None:
        later = len([s for s in target.manifest.steps if s > every[-1].number])
        return _aligned(results, target, gate, every, later, how_much)
    return _diverged(results, gate, every, step, diverged, benchmark, target, how_much)


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


def _extents(results: Results, judged: dict[str, pl.DataFrame], found: list[Curve]) -> Extents:
    """How much was judged, of records, key data and what the trainer reports."""
    runs = [run for role in (BENCHMARK, TARGET) if (run := results.run(role)) is not None]
    held = {curve.metric for curve in found if curve.verdict != NOT_JUDGED}
    return extent.with_metrics(extent.of(judged), *runs, judged=held)


def _strip(
    results: Results, target: Run, step: Step, diverged: Finding | None, gate: Gate
) -> list[StageResult]:
    """Every stage of the benchmark's step, in order, and what was found of it."""
    planned = results.stages()
    strip = []
    after = False
    for name in [*stages.STAGES, *(s for s in planned if s not in stages.STAGES)]:
        found = target.manifest.stages.get(name)
        finding = step.findings.get(name)
        if found is not None and found.state == "replayed":
            strip.append(StageResult(name, "replayed", 0, 0))
        elif finding is None or gate.is_shut or not finding.records:
            if name in planned or finding is not None:
                counts = (finding.records, finding.beyond) if finding is not None else (0, 0)
                strip.append(StageResult(name, "not_compared", *counts))
        elif diverged is not None and finding is diverged:
            strip.append(StageResult(name, "diverged", finding.records, finding.beyond))
            after = True
        elif finding.origin is not None and after:
            strip.append(StageResult(name, "inherited", finding.records, finding.beyond))
        else:
            strip.append(StageResult(name, "aligned", finding.records, finding.beyond))
    return strip


def _of_all(strips: Sequence[list[StageResult]]) -> list[StageResult]:
    """The strip of several steps that agree: each stage with the records of all."""
    whole = []
    for cells in zip(*strips, strict=True):
        compared = [cell for cell in cells if cell.state == "aligned"] or list(cells)
        whole.append(
            msgspec.structs.replace(
                compared[0],
                records=sum(cell.records for cell in compared),
                beyond=sum(cell.beyond for cell in compared),
            )
        )
    return whole


def _aligned(
    results: Results,
    target: Run,
    gate: Gate,
    every: Sequence[Step],
    later: int,
    judged: Judged,
) -> Diagnosis:
    strip = _of_all([_strip(results, target, step, None, gate) for step in every])
    largest = max(_largest(step) for step in every)
    unused = sum(finding.unused for step in every for finding in step.findings.values())
    numbers = [step.number for step in every]
    caveats = sum(item.state == CAVEAT for item in gate.items)
    return Diagnosis(
        verdict="aligned",
        sentence=sentence.aligned(results.plan, strip, largest, unused, caveats, numbers, later)
        + judged.said(),
        gate=gate.items,
        first=None,
        cause=None,
        coverage=coverage(results),
        noise=_noise(results, every, None),
        stages=strip,
        extent=judged.extents,
        curves=judged.curves,
        judged=judged.summary,
    )


def _diverged(
    results: Results,
    gate: Gate,
    every: Sequence[Step],
    step: Step,
    diverged: Finding,
    benchmark: Run,
    target: Run,
    judged: Judged,
) -> Diagnosis:
    strip = _strip(results, target, step, diverged, gate)
    before = [other.number for other in every if other.number < step.number]
    diverged = multiples.measured(results, step.number, diverged)
    cause = classify(step, diverged, _world_size(target), _profile(results, step, diverged))
    cause = _with_block(results, step, diverged, cause)
    first = _first(results, step, diverged, benchmark)
    assert diverged.origin is not None
    row = diverged.origin.row
    begin = target.manifest.first_step
    return Diagnosis(
        verdict="diverged",
        sentence=sentence.diverged(
            results.plan,
            first,
            None if begin is None else begin + step.number,
            decisive.of(row),
            row.get("excess"),
            cause,
            before,
        )
        + judged.said(),
        gate=gate.items,
        first=first,
        cause=cause,
        coverage=coverage(results),
        noise=_noise(results, [step], diverged),
        stages=strip,
        extent=judged.extents,
        curves=judged.curves,
        judged=judged.summary,
    )


def _left(
    results: Results,
    step: Step,
    strip: list[StageResult],
    gate: Gate,
    gone: Curve,
    target: Run,
    judged: Judged,
) -> Diagnosis:
    """No record parts, and the trainer's curves do."""
    begin = target.manifest.first_step
    number = gone.step or 0
    return Diagnosis(
        verdict="diverged",
        sentence=sentence.left(
            results.plan, number, None if begin is None else begin + number, gone,
            judge_curves.said(gone),
        )
        + judged.said(),
        gate=gate.items,
        first=curves.first(gone),
        cause=curves.cause(judged.curves, gone),
        coverage=coverage(results),
        noise=_noise(results, [step], None),
        stages=strip,
        extent=judged.extents,
        curves=judged.curves,
        judged=judged.summary,
    )  # fmt: skip


def _not_comparable(
    results: Results,
    gate: Gate,
    step: Step,
    strip: list[StageResult],
    benchmark: Run,
    judged: Judged,
) -> Diagnosis:
    first: First | None = None
    cause: Cause | None = None
    if gate.shut is not None:
        cause = of_gate(gate.shut)
        shut = gate.shut
        if shut.stage:
            first = First(
                shut.stage, step.number if shut.step is None else shut.step, shut.rank,
                shut.module, None, shut.operator,
                _sample_id(benchmark, step.number, shut.sample), None, shut.benchmark, shut.target,
            )  # fmt: skip
    return Diagnosis(
        verdict="not_comparable",
        sentence=sentence.not_comparable(
            results.plan, [item for item in gate.items if item.state == SHUT]
        ),
        gate=gate.items,
        first=first,
        cause=cause,
        coverage=coverage(results),
        noise=_noise(results, [step], None),
        stages=strip,
        extent=judged.extents,
        curves=judged.curves,
        judged=judged.summary,
    )


def _world_size(run: Run) -> int:
    return max((process.world_size for process in run.manifest.layout), default=1)


def _sample_id(benchmark: Run, step: int, digest: str | None) -> str | None:
    """A sample's id in the rollouts; its digest where they are not in the store."""
    path = benchmark.rollouts.get(step)
    if digest is None or path is None:
        return digest
    try:
        samples = hdf5.read(path).samples
    except ReplayError:
        return digest  # the gate says that they cannot be read
    return next((s.id for s in samples if s.sample_digest == digest), digest)


def _profile(results: Results, step: Step, diverged: Finding) -> tokens.Profile | None:
    row = diverged.origin.row if diverged.origin is not None else {}
    if row.get("direction") != "forward" or not isinstance(row.get("order"), int):
        return None
    passes = diverged.stage.before_update
    rank = diverged.rank or 0
    return tokens.profile(results, diverged.stage.name, step.number, rank, row["order"], passes)


def _with_block(results: Results, step: Step, diverged: Finding, cause: Cause) -> Cause:
    """The cause with the block that sketches of tokens point at, where no record could."""
    stage = diverged.stage
    if stage.misplaced is None:
        return cause
    floors = stage.rows.filter(pl.col("floor").is_not_null()).select("name", "floor")
    found = tokens.first_block(results, stage.name, step.number, floors)
    if found is None:
        return cause
    name, error = found
    said = say(
        "of the blocks' outputs, joined token by token, {name} is the first to differ, half of "
        "its tokens by more than {error:.2g}",
        name=name,
        error=error,
    )
    return msgspec.structs.replace(cause, evidence=[*cause.evidence, said])


def _first(results: Results, step: Step, diverged: Finding, benchmark: Run) -> First:
    origin = diverged.origin
    assert origin is not None
    row = origin.row
    sample, token = _place(diverged)
    if sample is None and isinstance(row.get("order"), int):
        # a stage without key data of its own: token sketches, where they were captured
        rank = diverged.rank or 0
        found = tokens.place(results, diverged.stage.name, step.number, rank, row["order"])
        sample, token = found or (None, None)
    sample = _sample_id(benchmark, step.number, sample)
    return First(
        stage=diverged.stage.name,
        step=step.number,
        rank=diverged.rank or 0,
        module=origin.module,
        call=row.get("call"),
        operator=origin.operator,
        sample=sample,
        token=token,
        benchmark=_side(row, "benchmark"),
        target=_side(row, "target"),
    )


def _place(diverged: Finding) -> tuple[str | None, int | None]:
    """Sample and position where the stage's own key data parts most."""
    found = [d for d in diverged.key_data if (d.error or any(d.lopsided)) and d.sample is not None]
    if not found:
        return None, None
    worst = max(found, key=lambda d: (max(d.lopsided), d.error or 0.0))
    return worst.sample, worst.position


def _side(row: dict[str, Any], side: str) -> Values:
    values: Values = {"record": row.get(f"name_{side}") or row.get("name")}
    for name in ("dtype", "shape", "max", "min", "mean", "norm", "value"):
        value = row.get(f"{name}_{side}")
        if value is not None:
            values[name] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """Strict JSON has no number for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _largest(step: Step) -> float:
    """The nearest any judged record of a stage without divergence came to its floor."""
    nearest = 0.0
    for finding in step.findings.values():
        value = finding.held.get_column("excess").max()
        if isinstance(value, float) and math.isfinite(value):
            nearest = max(nearest, value)
    return nearest


def _noise(results: Results, steps: Sequence[Step], diverged: Finding | None) -> Values:
    """How floors were made, what controls showed, and the extremes of these steps."""
    findings: dict[str, list[Finding]] = {}
    for step in steps:
        for name, finding in step.findings.items():
            findings.setdefault(name, []).append(finding)
    controls = {
        pair: _control(results, pair)
        for pair in (REPEAT, REPEAT_TARGET, HIGH_PRECISION)
        if pair in results.plan.pairs
    }
    found: Values = {
        "floor": "max(repeats' difference, round-off bound of dtype, depth and reduction length)",
        "safety": noise.SAFETY,
        "repeat_factor": REPEAT_FACTOR,
        "false_alarm_rate": noise.FALSE_ALARM_RATE,
        "controls": controls,
        "stages": {name: _of_stage(found) for name, found in findings.items()},
    }
    if HIGH_PRECISION in controls:
        found["r_limit"] = R_LIMIT
    if diverged is not None and diverged.origin is not None:
        row = diverged.origin.row
        measure = decisive.of(row)
        found["first"] = {
            "record": row.get("name"), "slot": row.get("slot"), "measure": measure.name,
            "error": _plain(measure.error), "error_kind": row.get("error_kind"),
            "floor": _plain(measure.floor), "ratio": _plain(row.get("excess")),
            "R": _plain(row.get("R")),
        }  # fmt: skip
    return found


def _control(results: Results, pair: str) -> Values:
    known = [s for stage in results.stages(pair) if (s := results.summary(pair, stage))]
    return {
        "compared": sum(s["compared"] for s in known),
        "identical": sum(s["identical"] for s in known),
        "no_difference_seen": sum(s.get("no_difference_seen", 0) for s in known),
        "max_error": _largest_error(results, pair),
    }


def _largest_error(results: Results, pair: str) -> float | None:
    """Over all records but masks, whose "lowest number" is another in each format."""
    found = []
    for stage in results.stages(pair):
        lazy = compared.scan(results, pair, stage, ["index", "error"])
        if lazy is not None:
            rows = lazy.filter(~pl.col("index").fill_null("").str.contains("mask"))
            found.append(compared.collect(rows, results.compared(pair, stage)))
    largest = pl.concat(found).get_column("error").max() if found else None
    return float(largest) if isinstance(largest, float) else None


def _of_stage(findings: Sequence[Finding]) -> Values:
    """The extremes of a stage's judged records, at one step or several."""
    columns = ["error", "floor", "excess"]
    held = pl.concat([finding.held.select(columns) for finding in findings])
    rows = held.filter(pl.col("error").is_not_null())
    numbers = rows.filter(pl.col("floor") > 0)
    return {
        "median_floor": _plain(numbers.get_column("floor").median()),
        "largest_floor": _plain(numbers.get_column("floor").max()),
        "largest_error": _plain(rows.get_column("error").max()),
        "largest_ratio": _plain(rows.get_column("excess").max()),
        "confined_to_unused_positions": any(finding.confined for finding in findings),
        "near_ties": sum(p.near_ties for finding in findings for p in finding.stage.processes),
    }
