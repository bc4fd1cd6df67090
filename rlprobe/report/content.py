"""What the page says, as plain data for the template; all text is escaped there."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rlprobe.diagnose import diagnosis, mismatch, sentence
from rlprobe.diagnose.curves import perturbed
from rlprobe.diagnose.diagnosis import Diagnosis, GateItem, StageResult
from rlprobe.judge import analysis, extent, noise
from rlprobe.judge.analysis import Step
from rlprobe.judge.extent import Extent
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference
from rlprobe.report import card, chart, commands, heat, payload, scope, side_by_side, tables, words
from rlprobe.report.card import Card
from rlprobe.report.commands import Command
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
    evidence: str
    action: str


@dataclass(frozen=True)
class Cell:
    """One stage of the strip."""

    stage: str
    state: str
    text: str


@dataclass(frozen=True)
class Chart:
    """One stage's error against depth."""

    stage: str
    svg: Markup
    caption: str


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
class GapRow:
    """Training against rollout on one side."""

    side: str
    tokens: int
    numbers: list[float]


@dataclass(frozen=True)
class Gap:
    """Training against rollout, both sides."""

    columns: list[str]
    rows: list[GapRow]
    bars: str
    svg: Markup | None


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    name: str
    verdict: str
    #: Name of the text that says what the verdict means.
    meaning: str
    #: The cause in words; empty where none is known.
    headline: str
    sentence: str
    facts: list[tuple[Markup, str]]
    next: list[Command]
    gate: list[Item]
    #: How many items are in each state.
    states: dict[str, int]
    step: int
    trainer_step: int | None
    #: All that were judged.
    judged_steps: list[int]
    #: Whether each step of the target began from the benchmark's state.
    joined: bool
    strip: list[Cell]
    grid: Grid | None
    card: Card | None
    extent: Extent
    reasons: list[Reason]
    unmatched: list[tuple[str, str, str]]
    notes: list[tuple[str, str]]
    charts: list[Chart]
    heat: heat.Heat | None
    controls: str
    records: payload.Records
    aggregated: Markup | None
    #: Parquet tables beside the page.
    tables: list[str]
    worst: list[StageTable]
    key_data: list[KeyRow]
    metrics: list[MetricRow]
    curves: list[CurveRow]
    #: What the sentence says of them.
    curves_said: str
    many_steps: bool
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
    provenance: list[tuple[str, str]]
    #: What the scripts need besides records.
    live: dict[str, Any]
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
) -> Page:
    """Bring the page's content together.

    Args:
        results: what was judged.
        found: its diagnosis.
        step: what judging found.
        benchmark: the run compared against.
        target: the run in question.
        texts: whether prompts and responses are shown.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    first_step = target.manifest.first_step
    different, same = side_by_side.environment(benchmark, target)
    metrics = side_by_side.metrics(benchmark, target)
    curves = side_by_side.curves(benchmark, target, found.curves)
    stages = [name for name in results.stages(TARGET) if tables.is_judged(results, name)]
    records = payload.records(results, stages)
    marked = (found.noise.get("first") or {}).get("record")
    first = found.first
    return Page(
        name=results.plan.name,
        verdict=found.verdict,
        meaning=_meaning(results, found.verdict),
        headline=card.headline(found),
        sentence=found.sentence,
        facts=_facts(results, found, benchmark, target),
        next=commands.next_steps(results, found, benchmark, target),
        gate=[_item(item) for item in found.gate],
        states={"open": 0, "caveat": 0, "shut": 0} | Counter(item.state for item in found.gate),
        step=step.number,
        trainer_step=None if first_step is None else first_step + step.number,
        judged_steps=_judged_steps(found),
        joined=target.is_joined,
        strip=[_cell(result, found, step.number) for result in found.stages],
        grid=scope.grid(records.rows, stages),
        card=card.build(found, step, benchmark, target, texts=texts),
        extent=extent.total(found.extent),
        reasons=scope.unjudged(found.extent),
        unmatched=tables.unmatched(results),
        notes=tables.notes(results, step),
        charts=_charts(step, marked),
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
        curves=side_by_side.verdicts(found.curves, first_step or 0),
        curves_said=sentence.of_curves(found.curves, len(perturbed(results))).strip(),
        many_steps=any(len(curve["steps"]) > 1 for curve in curves),
        mismatch=_gap(benchmark, target, step.number),
        weights=side_by_side.weights(benchmark, target, step.number),
        environment=different,
        same_environment=same,
        environment_known=bool(benchmark.environment() or target.environment()),
        commands=commands.every(results, benchmark, target, found),
        source=str(results.directory.resolve()),
        runs=f"{benchmark.key}-{target.key}",
        provenance=_provenance(results, benchmark, target),
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


def _item(item: GateItem) -> Item:
    return Item(words.item(item.item), item.state, item.evidence, item.action)


def _meaning(results: Results, verdict: str) -> str:
    """Of dumps it is not known that both sides were given the same rollouts."""
    of_dumps = results.of_dumps and verdict != diagnosis.NOT_COMPARABLE
    return f"{verdict}_dumps_means" if of_dumps else f"{verdict}_means"


def _facts(
    results: Results, found: Diagnosis, benchmark: Run, target: Run
) -> list[tuple[Markup, str]]:
    plan = results.plan
    sides = [
        plan.runs[role].framework_version for role in ("benchmark", "target") if role in plan.runs
    ]
    versions = dict.fromkeys(version or plan.framework_version for version in sides)
    named = f"{plan.framework} {' against '.join(versions) or plan.framework_version}".strip()
    given = [] if results.of_dumps else [("framework", named or "unknown")]
    for role, run in (("benchmark", benchmark), ("target", target)):
        if results.of_dumps:
            given.append((role, str(run.path)))
            continue
        planned = plan.runs.get(role)
        what = f"{planned.device} {planned.precision}" if planned else "unknown"
        given.append((role, f"{what}, run {run.key[:12]}"))
    fault = target.manifest.declared.get("fault")
    if fault:
        given.append(("planted_fault", str(fault).rpartition(":")[2]))
    shares = found.coverage
    both = f"{shares.get('benchmark', 0.0):.1%} / {shares.get('target', 0.0):.1%}"
    given.append(("coverage", both))
    judged = extent.total(found.extent)
    if judged.recorded:
        given.append(("judged", f"{judged.judged:,} / {judged.recorded:,}"))
    return [(words.both(key), value) for key, value in given]


def _judged_steps(found: Diagnosis) -> list[int]:
    return sorted(
        {step for steps in found.extent.values() for step, one in steps.items() if one.judged}
    )


def _cell(result: StageResult, found: Diagnosis, step: int) -> Cell:
    # what is excused is not judged: the same count as the page's own
    counted = found.extent.get(result.stage, {}).get(step)
    text = f"{counted.judged if counted else result.records:,} records judged"
    if result.state == "replayed":
        proof = next((item for item in found.gate if item.item == "mock proof"), None)
        text = proof.evidence if proof is not None else "rollouts of the benchmark"
    elif result.beyond:
        text += f", {result.beyond:,} beyond the floor"
    elif result.state == "aligned":
        stage = (found.noise.get("stages") or {}).get(result.stage) or {}
        if isinstance(stage.get("largest_ratio"), int | float):
            text += f", the nearest at {stage['largest_ratio']:.2g} of its floor"
        if stage.get("confined_to_unused_positions"):
            text += "; others differ only where no result looks (padding)"
    return Cell(result.stage, result.state, text)


def _charts(step: Step, marked: str | None) -> list[Chart]:
    charts = []
    for name, finding in step.findings.items():
        first = finding.origin.row["name"] if finding.origin is not None else marked
        svg = chart.error_against_depth(finding.stage.rows, first)
        if svg is not None:
            caption = f"{finding.records:,} records, {finding.beyond:,} beyond the band"
            if finding.confined:
                caption += f"; {finding.unused:,} more beyond it only where no result looks"
            charts.append(Chart(name, svg, caption))
    return charts


def _heat(results: Results, step: Step, benchmark: Run, *, texts: bool) -> heat.Heat | None:
    """Tokens by layers of the stage that parts first, in the sample that differs most."""
    diverged = analysis.first_of(step)
    if diverged is None:
        return None
    differ = [d for d in diverged.key_data if d.error and d.sample is not None]
    worst = max(differ, key=lambda d: d.error or 0.0, default=None)
    sample = worst.sample if worst is not None else None
    return heat.build(results, diverged, benchmark, sample, texts=texts)


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


def _controls(found: Diagnosis) -> str:
    said = []
    names = {"repeat": "The benchmark's repeat", "repeat_target": "The target's repeat",
             "high_precision": "The high-precision control"}  # fmt: skip
    for pair, control in (found.noise.get("controls") or {}).items():
        compared = control.get("compared") or 0
        if not compared:
            said.append(f"{names.get(pair, pair)} could not be compared.")
            continue
        identical = control.get("identical") or 0
        unseen = control.get("no_difference_seen") or 0
        text = f"{names.get(pair, pair)}: {identical:,} of {compared:,} records identical"
        text += f", no difference seen in {unseen:,}" if unseen else ""
        largest = control.get("max_error")
        differ = largest and identical + unseen < compared
        text += f", largest difference {largest:.2g}." if differ else "."
        said.append(text)
    return " ".join(said) or "No control was run, so the devices' own randomness is unknown."


def _aggregated(records: payload.Records) -> Markup | None:
    if not records.aggregated:
        return None
    more = ", then those nearest to their floor" if records.rows.height >= payload.MOST else ""
    return words.both(
        "records_aggregated", n=f"{records.rows.height:,}", m=f"{records.total:,}", more=more
    )


def _gap(benchmark: Run, target: Run, step: int) -> Gap | None:
    measured = [
        (side, found)
        for side, run in (("benchmark", benchmark), ("target", target))
        if (found := mismatch.measure(run, step)) is not None
    ]
    if not measured:
        return None
    lines = [(side, m.by_position.tolist()) for side, m in measured]
    drawn = any(value > 0 for _, line in lines for value in line)
    return Gap(
        columns=[
            "mean |d|", "max |d|", "k1", "k3", "mask 0", "train NaN, ±∞", "rollout NaN, ±∞",
        ],
        rows=[
            GapRow(side, m.tokens, [m.mean_abs, m.max_abs, m.k1, m.k3, m.masked,
                                    m.trained_nonfinite, m.generated_nonfinite])
            for side, m in measured
        ],
        bars=", ".join(text for _, text in mismatch.BARS),
        svg=chart.by_position(lines, mismatch.BARS[0][0]) if drawn else None,
    )  # fmt: skip


def _provenance(results: Results, benchmark: Run, target: Run) -> list[tuple[str, str]]:
    data = (results.directory / diagnosis.NAME).read_bytes()
    found = [("sha256 of diagnosis.json", hashlib.sha256(data).hexdigest())]
    what = "dump" if results.of_dumps else "run"
    found += [
        (f"{role} {what}", str(run.path) if results.of_dumps else run.key)
        for role, run in (("benchmark", benchmark), ("target", target))
    ]
    for role, run in (("benchmark", benchmark), ("target", target)):
        versions: dict[str, str] = {}
        for process in run.environment().values():
            versions |= {k: str(v) for k, v in (process.get("versions") or {}).items()}
        text = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        if text:
            found.append((f"{role} versions", text))
    return found
