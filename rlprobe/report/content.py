"""What the page says, as plain data for the template; all text is escaped there."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

import polars as pl
from markupsafe import Markup

from rlprobe.diagnose import mismatch
from rlprobe.diagnose.diagnosis import Diagnosis, GateItem, StageResult
from rlprobe.judge import analysis, extent, noise
from rlprobe.judge.analysis import Step
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference
from rlprobe.report import card, chart, heat, side_by_side, tables
from rlprobe.report.card import Card
from rlprobe.report.side_by_side import MetricRow, Setting
from rlprobe.report.tables import StageTable, Trend
from rlprobe.roles import HIGH_PRECISION, REPEAT, TARGET
from rlprobe.store.read import Run
from rlprobe.version import __version__

WORDS = {
    "aligned": "Aligned",
    "diverged": "Diverged",
    "not_comparable": "Not comparable",
    "inherited": "parts too, after the first",
    "replayed": "replayed",
    "not_compared": "not judged",
}


@dataclass(frozen=True)
class Cell:
    """One stage of the strip."""

    stage: str
    state: str
    word: str
    text: str


@dataclass(frozen=True)
class Chart:
    """One stage's error against depth."""

    stage: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class Gap:
    """Training against rollout, both sides."""

    rows: list[dict[str, Any]]
    bars: str
    svg: Markup | None


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    name: str
    verdict: str
    verdict_word: str
    sentence: str
    facts: list[tuple[str, str]]
    gate: list[GateItem]
    step: int
    trainer_step: int | None
    strip: list[Cell]
    card: Card | None
    charts: list[Chart]
    heat: heat.Heat | None
    repeated: bool
    precise: bool
    false_alarm: str
    controls: str
    key_data: list[Difference]
    metrics: list[MetricRow]
    more_metrics: list[MetricRow]
    trend: Trend | None
    mismatch: Gap | None
    stages: list[StageTable]
    environment: list[Setting]
    same_environment: list[Setting]
    commands: list[tuple[str, str]]
    source: str
    safety: str = f"{noise.SAFETY:g}"
    version: str = __version__
    words: dict[str, str] = field(default_factory=lambda: WORDS)


def gather(results: Results, found: Diagnosis, step: Step, benchmark: Run, target: Run) -> Page:
    """Bring the page's content together.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    first_step = target.manifest.first_step
    marked = (found.noise.get("first") or {}).get("record")
    different, same = side_by_side.environment(benchmark, target)
    shown, more = side_by_side.metrics(benchmark, target)
    return Page(
        name=results.plan.name,
        verdict=found.verdict,
        verdict_word=WORDS[found.verdict],
        sentence=found.sentence,
        facts=_facts(results, found, benchmark, target),
        gate=found.gate,
        step=step.number,
        trainer_step=None if first_step is None else first_step + step.number,
        strip=[_cell(result, found) for result in found.stages],
        card=card.build(found, step, benchmark, target),
        charts=_charts(step, marked),
        heat=_heat(results, step, benchmark),
        repeated=REPEAT in results.plan.pairs,
        precise=HIGH_PRECISION in results.plan.pairs,
        false_alarm=f"{1 / noise.FALSE_ALARM_RATE:,.0f}",
        controls=_controls(found),
        key_data=[step.key_data[name] for name in sorted(step.key_data)],
        metrics=shown,
        more_metrics=more,
        trend=tables.trend(results),
        mismatch=_gap(benchmark, target, step.number),
        stages=[
            tables.stage(results, name, step, open_=found.first is not None
                         and found.first.stage == name)
            for name in results.stages(TARGET)
        ],
        environment=different,
        same_environment=same,
        commands=_commands(results, benchmark, target, found),
        source=str(results.directory),
    )  # fmt: skip


def _facts(
    results: Results, found: Diagnosis, benchmark: Run, target: Run
) -> list[tuple[str, str]]:
    plan = results.plan
    facts = [("framework", f"{plan.framework} {plan.framework_version}".strip() or "unknown")]
    for role, run in (("benchmark", benchmark), ("target", target)):
        planned = plan.runs.get(role)
        what = f"{planned.device} {planned.precision}" if planned else "unknown"
        facts.append((role, f"{what}, run {run.key[:12]}"))
    fault = target.manifest.declared.get("fault")
    if fault:
        facts.append(("planted fault", str(fault).rpartition(":")[2]))
    shares = found.coverage
    facts.append(
        ("coverage", f"{shares.get('benchmark', 0.0):.1%} / {shares.get('target', 0.0):.1%}")
    )
    judged = extent.total(found.extent)
    if judged.judged != judged.recorded:
        facts.append(("judged", f"{judged.judged:,} of {judged.recorded:,}"))
    return facts


def _cell(result: StageResult, found: Diagnosis) -> Cell:
    text = f"{result.records:,} records judged"
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
    return Cell(result.stage, result.state, WORDS[result.state].lower(), text)


def _charts(step: Step, marked: str | None) -> list[Chart]:
    charts = []
    for name, finding in step.findings.items():
        first = finding.origin.row["name"] if finding.origin is not None else marked
        svg = chart.error_against_depth(finding.stage.rows, first)
        if svg is not None:
            equal = finding.stage.rows.filter(pl.col("judged") & (pl.col("error") == 0)).height
            caption = f"{finding.records:,} records, {finding.beyond:,} beyond the band"
            caption += f", {equal:,} equal" if equal else ""
            if finding.confined:
                caption += f"; {finding.unused:,} more beyond it only where no result looks"
            charts.append(Chart(name, svg, caption))
    return charts


def _heat(results: Results, step: Step, benchmark: Run) -> heat.Heat | None:
    """Tokens by layers of the stage that parts first, in the sample that differs most."""
    parted = analysis.first_of(step)
    if parted is None:
        return None
    differ = [d for d in parted.key_data if d.error and d.sample is not None]
    worst = max(differ, key=lambda d: d.error or 0.0, default=None)
    return heat.build(results, parted, benchmark, worst.sample if worst is not None else None)


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


def _gap(benchmark: Run, target: Run, step: int) -> Gap | None:
    measured = [
        (side, found)
        for side, run in (("benchmark", benchmark), ("target", target))
        if (found := mismatch.measure(run, step)) is not None
    ]
    if not measured:
        return None
    rows = [
        {"side": side, "tokens": m.tokens, "mean_abs": m.mean_abs, "max_abs": m.max_abs,
         "k1": m.k1, "k3": m.k3}
        for side, m in measured
    ]  # fmt: skip
    lines = [(side, m.by_position.tolist()) for side, m in measured]
    drawn = any(value > 0 for _, line in lines for value in line)
    return Gap(
        rows=rows,
        bars=", ".join(text for _, text in mismatch.BARS),
        svg=chart.by_position(lines, mismatch.BARS[0][0]) if drawn else None,
    )


def _commands(
    results: Results, benchmark: Run, target: Run, found: Diagnosis
) -> list[tuple[str, str]]:
    stage = f" --stage {found.first.stage}" if found.first is not None else ""
    directory = shlex.quote(str(results.directory))
    both = " ".join(shlex.quote(str(run.path)) for run in (benchmark, target))
    commands = [
        (
            "Compare the two runs again, every difference measured:",
            f"rlprobe compare {both} -o comparison{stage}",
        ),
        (
            "Judge and write this page again:",
            f"rlprobe diagnose {directory} && rlprobe report {directory}",
        ),
    ]
    facts = target.manifest.volatile.get("run") or {}
    command = facts.get("command")
    if isinstance(command, list) and command:
        environment = target.manifest.declared.get("environment") or {}
        before = "".join(f"{k}={shlex.quote(str(v))} " for k, v in sorted(environment.items()))
        commands.append(
            (
                "What the target ran, rlprobe's hooks on (`rlprobe run --role target` does it):",
                before + shlex.join(str(word) for word in command),
            )
        )
    return commands
