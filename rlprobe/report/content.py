"""What the page says, as plain data for the template; all text is escaped there."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from markupsafe import Markup

from rlprobe import files
from rlprobe.diagnose import diagnosis, sentence
from rlprobe.diagnose.curves import perturbed
from rlprobe.diagnose.diagnosis import CAVEAT, SHUT, Diagnosis, First, GateItem, StageResult
from rlprobe.judge import analysis, extent, noise
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.extent import Extent
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference
from rlprobe.judge.routed import Routed
from rlprobe.report import (
    advice,
    card,
    chart,
    commands,
    gradient_norms,
    heat,
    history,
    narrowed,
    payload,
    rollout,
    scope,
    side_by_side,
    tables,
    words,
)
from rlprobe.report.card import Card
from rlprobe.report.commands import Command
from rlprobe.report.narrowed import Narrowed
from rlprobe.report.rollout import Gap
from rlprobe.report.scope import Grid, Reason
from rlprobe.report.side_by_side import CurveRow, MetricRow, Setting, WeightRow
from rlprobe.report.tables import StageTable
from rlprobe.roles import TARGET
from rlprobe.store.read import Run
from rlprobe.version import __version__


@dataclass(frozen=True)
class Item:
    """An item of the gate, by the name the page gives it."""

    name: Markup
    state: str
    evidence: Markup
    action: Markup | None


@dataclass(frozen=True)
class Cell:
    """One stage of the strip."""

    stage: str
    state: str
    text: Markup


@dataclass(frozen=True)
class Chart:
    """One stage's error against depth."""

    stage: str
    svg: Markup
    caption: Markup


@dataclass(frozen=True)
class KeyRow:
    """Key data of one name, and both sides' values where the worst sample differs most."""

    name: str
    error: float | None
    mean_abs: float
    max_abs: float
    share: float
    joined: int
    benchmark_only: int
    target_only: int
    where: str
    benchmark: float | None
    target: float | None


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    name: str
    verdict: str
    #: Name of the text that says what the verdict means.
    meaning: str
    #: The cause in words; None where none is known.
    headline: Markup | None
    #: What its class means, and where to look first.
    kind: Markup | None
    advice: Markup | None
    #: How the cause is known, by the name of its text.
    known: str | None
    sentence: Markup
    #: The sentence in English, for whoever reads the page's head.
    plain_sentence: str
    facts: list[tuple[Markup, Markup | str]]
    next: list[Command]
    gate: list[Item]
    #: How many items are in each state.
    states: dict[str, int]
    step: int
    trainer_step: int | None
    #: All whose stages were judged, and the captured ones of which none was.
    judged_steps: list[int]
    other_steps: list[int]
    #: Whether each step of the target began from the benchmark's state.
    joined: bool
    strip: list[Cell]
    grid: Grid | None
    card: Card | None
    extent: Extent
    reasons: list[Reason]
    unmatched: list[tuple[str, str, str]]
    notes: list[tuple[str, Markup]]
    charts: list[Chart]
    heat: heat.Heat | None
    controls: list[Markup]
    records: payload.Records
    aggregated: Markup | None
    #: Parquet tables beside the page.
    tables: list[str]
    worst: list[StageTable]
    key_data: list[KeyRow]
    metrics: list[MetricRow]
    curves: list[CurveRow]
    #: What the sentence says of them.
    curves_said: Markup | None
    many_steps: bool
    #: Which tokens were sent to other experts.
    routing: list[Routed]
    mismatch: Gap | None
    weights: list[WeightRow]
    environment: list[Setting]
    same_environment: list[Setting]
    #: Whether either side said on what it ran.
    environment_known: bool
    commands: list[Command]
    source: str
    #: Keys of the two runs: another pair is another page.
    runs: str
    provenance: list[tuple[Markup, str]]
    #: What the scripts need besides records.
    live: dict[str, Any]
    #: sha256 of ``diagnosis.json``.
    diagnosis: str
    #: Where the page's own digest goes.
    digest: Markup = field(default_factory=history.unsealed)
    safety: str = f"{noise.SAFETY:g}"
    version: str = __version__


def gather(
    results: Results,
    found: Diagnosis,
    step: Step,
    benchmark: Run,
    target: Run,
    *,
    texts: bool = True,
    judged: Narrowed | None = None,
) -> Page:
    """Bring the page's content together.

    Args:
        results: what was judged.
        found: its diagnosis.
        step: what judging found.
        benchmark: the run compared against.
        target: the run in question.
        texts: whether prompts and responses are shown.
        judged: the tables that ``step`` was read from; None: those of ``results``.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    judged = judged or Narrowed(results, None if found.first is None else found.first.rank)
    first_step = target.manifest.first_step
    digest = files.digest(results.directory / diagnosis.NAME).sha256
    different, same = side_by_side.environment(benchmark, target)
    stages = [name for name in results.stages(TARGET) if tables.is_judged(results, name)]
    begin = benchmark.manifest.first_step or 0
    norms = gradient_norms.by_group(judged, stages, begin)
    metrics = side_by_side.metrics(benchmark, target, norms)
    curves = side_by_side.curves(metrics, begin, found.curves)
    marked = (found.noise.get("first") or {}).get("record")
    first = found.first
    records = payload.records(judged, stages, first=_leading(first, marked))
    headline = card.headline(found)
    captured, judged_steps = _steps(found)
    said_of_curves = sentence.of_curves(found.curves, len(perturbed(results)))
    return Page(
        name=results.plan.name,
        verdict=found.verdict,
        meaning=_meaning(results, found),
        headline=headline,
        kind=advice.kind(found),
        advice=advice.to_mend(results, found),
        known=None if found.cause is None else found.cause.known,
        sentence=words.sentence(
            found.sentence if headline is None else advice.without_cause(found), found.messages
        ),
        plain_sentence=found.sentence,
        facts=_facts(results, found, benchmark, target),
        next=[
            *commands.next_steps(results, found, benchmark, target),
            *commands.in_a_script(results, found),
        ],
        gate=[_item(item, found) for item in sorted(found.gate, key=_by_state)],
        states={"open": 0, "caveat": 0, "shut": 0} | Counter(item.state for item in found.gate),
        step=step.number,
        trainer_step=None if first_step is None else first_step + step.number,
        judged_steps=judged_steps,
        other_steps=[at for at in captured if at not in judged_steps],
        joined=target.is_joined,
        strip=[_cell(result, found, step.number) for result in found.stages],
        grid=scope.grid(judged, stages),
        card=card.build(found, step, benchmark, target, texts=texts),
        extent=extent.total(found.extent),
        reasons=scope.unjudged(found.extent),
        unmatched=tables.unmatched(results),
        notes=tables.notes(results, step),
        charts=_charts(step, marked, found, judged),
        heat=_heat(results, step, benchmark, texts=texts),
        controls=_controls(found),
        records=records,
        aggregated=_aggregated(records),
        tables=[f"judged/{name}.parquet" for name in stages],
        worst=[
            tables.stage(name, step, open_=first is not None and first.stage == name)
            for name in stages
        ],
        key_data=[_key_row(step.key_data[name]) for name in sorted(step.key_data)],
        metrics=metrics,
        curves=side_by_side.verdicts(found.curves, first_step or 0, found.messages),
        curves_said=words.sentence(said_of_curves, {}) if said_of_curves else None,
        many_steps=any(len(curve["steps"]) > 2 for curve in curves),
        routing=found.routing,
        mismatch=rollout.gap(benchmark, target, step),
        weights=side_by_side.weights(benchmark, target, step.number),
        environment=different,
        same_environment=same,
        environment_known=bool(benchmark.environment() or target.environment()),
        commands=commands.every(results, benchmark, target, found),
        source=str(results.directory.resolve()),
        runs=f"{benchmark.key}-{target.key}",
        diagnosis=digest,
        provenance=_provenance(results, benchmark, target, digest),
        live={
            "stages": stages,
            "step": step.number,
            "first": None
            if first is None
            else {"stage": first.stage, "step": first.step, "rank": first.rank, "record": marked},
            "curves": curves,
            "stacks": card.stacks(step, benchmark, target, stages),
        },
    )


def _item(item: GateItem, found: Diagnosis) -> Item:
    return Item(
        words.item(item.item),
        item.state,
        words.sentence(item.evidence, found.messages),
        words.sentence(item.action, found.messages) if item.action else None,
    )


def _by_state(item: GateItem) -> int:
    """What refused the comparison first, then caveats, then what agrees."""
    return (SHUT, CAVEAT).index(item.state) if item.state in (SHUT, CAVEAT) else 2


def _meaning(results: Results, found: Diagnosis) -> str:
    """Of dumps it is not known that both sides were given the same rollouts."""
    if results.of_dumps and found.verdict != diagnosis.NOT_COMPARABLE:
        return f"{found.verdict}_dumps_means"
    if found.verdict == diagnosis.DIVERGED and advice.of_trainer(found):
        return "diverged_metric_means"
    return f"{found.verdict}_means"


def _facts(
    results: Results, found: Diagnosis, benchmark: Run, target: Run
) -> list[tuple[Markup, Markup | str]]:
    plan = results.plan
    sides = [
        plan.runs[role].framework_version for role in ("benchmark", "target") if role in plan.runs
    ]
    versions = dict.fromkeys(version or plan.framework_version for version in sides)
    named = f"{plan.framework} {' against '.join(versions) or plan.framework_version}".strip()
    given: list[tuple[str, Markup | str]] = []
    if not results.of_dumps:
        given.append(("framework", named or words.both("unknown")))
    for role, run in (("benchmark", benchmark), ("target", target)):
        if results.of_dumps:
            given.append((role, str(run.path)))
            continue
        planned = plan.runs.get(role)
        what = f"{planned.device} {planned.precision}, " if planned else ""
        given.append((role, words.both("fact_run", what=what, run=run.key[:12])))
    fault = target.manifest.declared.get("fault")
    if fault:
        given.append(("planted_fault", str(fault).rpartition(":")[2]))
    shares = found.coverage
    both = f"{shares.get('benchmark', 0.0):.1%} / {shares.get('target', 0.0):.1%}"
    given.append(("fact_coverage", both))
    judged = extent.total(found.extent)
    if judged.recorded:
        given.append(("fact_judged", f"{judged.judged:,} / {judged.recorded:,}"))
    return [(words.both(key), value) for key, value in given]


def _steps(found: Diagnosis) -> tuple[list[int], list[int]]:
    """Captured steps, and those that were judged: a trainer's metrics alone make none."""
    every = [steps for stage, steps in found.extent.items() if stage != extent.TRAINER]
    captured = {step for steps in every for step in steps}
    judged = {step for steps in every for step, one in steps.items() if one.judged}
    return sorted(captured), sorted(judged)


def _cell(result: StageResult, found: Diagnosis, step: int) -> Cell:
    if result.state == "replayed":
        proof = next((item for item in found.gate if item.item == "mock proof"), None)
        return Cell(
            result.stage,
            result.state,
            words.both("rollouts_of_benchmark")
            if proof is None
            else words.sentence(proof.evidence, found.messages),
        )
    # what is excused is not judged: the same count as the page's own
    counted = found.extent.get(result.stage, {}).get(step)
    judged = counted.judged if counted else result.records
    parts: list[tuple[str, dict[str, Any]]] = [("records_judged", {"n": f"{judged:,}"})]
    if result.beyond:
        parts.append(("some_beyond", {"n": f"{result.beyond:,}"}))
    elif result.state == "aligned":
        stage = (found.noise.get("stages") or {}).get(result.stage) or {}
        if isinstance(stage.get("largest_ratio"), int | float):
            parts.append(("nearest", {"ratio": f"{stage['largest_ratio']:.2g}"}))
        if stage.get("confined_to_unused_positions"):
            parts.append(("others_in_padding", {}))
    return Cell(result.stage, result.state, words.together(*parts))


def _leading(first: First | None, record: str | None) -> pl.Expr:
    """The row of the first divergence, which the page leads to."""
    if first is None or record is None:
        return narrowed.NOTHING
    at = {"stage": first.stage, "step": first.step, "rank": first.rank, "name": record}
    return pl.all_horizontal(pl.col(name) == value for name, value in at.items())


def _charts(step: Step, marked: str | None, found: Diagnosis, judged: Narrowed) -> list[Chart]:
    charts = []
    beyond = {result.stage: result.beyond for result in found.stages}
    for name, finding in step.findings.items():
        first = finding.origin.row["name"] if finding.origin is not None else marked
        svg = chart.error_against_depth(finding.stage.rows, first)
        if svg is not None:
            n, m = finding.records, finding.beyond
            if judged.part(name).narrowed:  # what is drawn is some of them
                n = found.extent[name][step.number].judged
                m = beyond.get(name, m)
            counts = {"n": f"{n:,}", "m": f"{m:,}"}
            parts: list[tuple[str, dict[str, Any]]] = [("chart_caption", counts)]
            if finding.confined:
                parts.append(("more_in_padding", {"n": f"{finding.unused:,}"}))
            charts.append(Chart(name, svg, words.together(*parts)))
    return charts


def _heat(results: Results, step: Step, benchmark: Run, *, texts: bool) -> heat.Heat | None:
    """Tokens by layers in the sample that differs most, of the stage that parts first.

    Where none parts: of the stage that comes nearest to it, of those whose tokens were sketched.
    """
    diverged = analysis.first_of(step)
    if diverged is not None:
        return _map(results, diverged, benchmark, texts=texts)
    nearest = sorted(step.findings.values(), key=_nearest, reverse=True)
    found = (_map(results, one, benchmark, texts=texts) for one in nearest)
    return next((one for one in found if one is not None), None)


def _nearest(finding: Finding) -> float:
    judged = pl.col("excess").filter(pl.col("judged")).max()
    largest = finding.stage.rows.select(judged).item()
    return largest if isinstance(largest, float) else 0.0


def _map(results: Results, finding: Finding, benchmark: Run, *, texts: bool) -> heat.Heat | None:
    differ = [d for d in finding.key_data if d.error and d.sample is not None]
    worst = max(differ, key=lambda d: d.error or 0.0, default=None)
    sample = worst.sample if worst is not None else None
    return heat.build(results, finding, benchmark, sample, texts=texts)


def _key_row(found: Difference) -> KeyRow:
    where = ""
    values: tuple[float | None, float | None] = (None, None)
    pair = next((p for p in found.pairs if p[0] == found.sample), None)
    if pair is not None and pair[1].size and pair[1].shape == pair[2].shape:
        _, left, right = pair
        apart = abs(right - left)
        # what is not finite on one side alone is the worst there can be
        apart[~(apart >= 0)] = math.inf
        at = int(apart.argmax())
        values = (float(left.flat[at]), float(right.flat[at]))
        where = f"{found.sample[:12] if found.sample else '–'} [{at}]"
    return KeyRow(
        found.name, found.error, found.mean_abs, found.max_abs, found.share, found.joined,
        found.benchmark_only, found.target_only, where, *values,
    )  # fmt: skip


def _controls(found: Diagnosis) -> list[Markup]:
    said = []
    for pair, control in (found.noise.get("controls") or {}).items():
        parts: list[tuple[str, dict[str, Any]]] = [(f"control_{pair}", {})]
        compared = control.get("compared") or 0
        if not compared:
            said.append(words.together(*parts, ("control_not_compared", {})))
            continue
        identical = control.get("identical") or 0
        unseen = control.get("no_difference_seen") or 0
        parts.append(("control_identical", {"n": f"{identical:,}", "m": f"{compared:,}"}))
        if unseen:
            parts.append(("control_unseen", {"n": f"{unseen:,}"}))
        largest = control.get("max_error")
        if largest and identical + unseen < compared:
            parts.append(("control_largest", {"error": f"{largest:.2g}"}))
        said.append(words.together(*parts))
    return said or [words.both("control_none")]


def _aggregated(records: payload.Records) -> Markup | None:
    if not records.aggregated:
        return None
    key = "records_aggregated"
    if records.rows.height >= payload.MOST:
        key = "records_aggregated_more"
    return words.both(key, n=f"{records.rows.height:,}", m=f"{records.total:,}")


def _provenance(
    results: Results, benchmark: Run, target: Run, digest: str
) -> list[tuple[Markup, str]]:
    found = [(words.both("inputs_digest"), digest)]
    what = "dump" if results.of_dumps else "run"
    found += [
        (words.both(f"{role}_{what}"), str(run.path) if results.of_dumps else run.key)
        for role, run in (("benchmark", benchmark), ("target", target))
    ]
    for role, run in (("benchmark", benchmark), ("target", target)):
        versions: dict[str, str] = {}
        for process in run.environment().values():
            versions |= {k: str(v) for k, v in (process.get("versions") or {}).items()}
        text = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        if text:
            found.append((words.both(f"{role}_versions"), text))
    return found
