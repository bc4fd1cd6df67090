"""Stages, steps, coverage, engines and controls: whether there is enough to judge by."""

from __future__ import annotations

from typing import Any

from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, listed, opened, shut
from rlprobe.dumps.results import of_key_data_alone
from rlprobe.judge.analysis import Step
from rlprobe.judge.excuses import positions
from rlprobe.judge.inputs import Results
from rlprobe.roles import REPEAT, REPEAT_TARGET, TARGET

STAGES, COVERAGE, CAPTURE, CONTROL = "stages and steps", "coverage", "capture", "repeats"
#: What msprobe does to what it watches at L0 and mix; `make contract` measures it on real verl.
OBSERVER = (
    "its module hooks add autograd nodes, by which fp32 gradients differ from an unwatched run's "
    "by up to 1e-6 of their norm, on both sides alike"
)


_SPLIT = (positions.SPREAD, positions.SPLIT, positions.SHUFFLED)


def check(evidence: Evidence) -> list[GateItem]:
    """Items stages and steps, coverage, capture, repeats."""
    return [
        _stages(evidence),
        coverage_item(evidence.results, evidence.step),
        _capture(evidence),
        _repeats(evidence.results),
    ]


def _stages(evidence: Evidence) -> GateItem:
    results = evidence.results
    wanted = results.stages()
    problems = []
    for side, run in (("benchmark", evidence.benchmark), ("target", evidence.target)):
        for stage in wanted:
            found = run.manifest.stages.get(stage)
            if found is None or found.state != "captured":
                problems.append(f"{side} did not capture {stage}")
            elif evidence.step.number not in found.steps:
                problems.append(f"{side} has no step {evidence.step.number} of {stage}")
    for stage in wanted:
        if results.summary(TARGET, stage) is None:
            problems.append(f"{stage} was not compared")
    steps = [set(run.manifest.steps) for run in (evidence.benchmark, evidence.target)]
    if problems:
        return shut(
            STAGES,
            listed(problems, 6),
            "see the run's log: a stage that did not run cannot agree; then run it again",
        )
    if not wanted:
        return shut(STAGES, "no stage was planned to be compared", "capture at least one stage")
    if steps[0] != steps[1]:
        return caveat(
            STAGES,
            f"benchmark has steps {sorted(steps[0])}, target {sorted(steps[1])}",
            "capture the same steps on both sides",
        )
    if evidence.target.is_joined:
        return opened(
            STAGES,
            f"{len(wanted)} stages, steps {sorted(steps[0])} on both sides, each judged: later "
            "ones begin from the benchmark's state",
        )
    if len(steps[0]) > 1:
        return caveat(
            STAGES,
            f"{len(wanted)} stages, steps {sorted(steps[0])} on both sides, of which step "
            f"{evidence.step.number} is judged: later ones inherit what updates differ by",
            "to have each step judged, set controls.rejoin: true; without it the report shows "
            "trends",
        )
    return opened(STAGES, f"{len(wanted)} stages, steps {sorted(steps[0])} on both sides")


def coverage(results: Results) -> dict[str, float]:
    """Share of each side's records that were measured, over all stages of the target's pair."""
    totals = {"benchmark": [0.0, 0.0], "target": [0.0, 0.0]}
    for stage in results.stages():
        summary = results.summary(TARGET, stage)
        if summary is None:
            continue
        for side, (measured, records) in totals.items():
            share = float(summary["coverage"][side])
            compared = float(summary["compared"])
            totals[side] = [measured + compared, records + (compared / share if share else 0.0)]
            if not share:
                totals[side][1] += _count(summary)
    return {side: (m / n if n else 0.0) for side, (m, n) in totals.items()}


def _count(summary: dict[str, Any]) -> float:
    return float(sum(summary["counts"].values()))


def coverage_item(results: Results, step: Step) -> GateItem:
    """Whether enough of both sides' records was measured."""
    poor, unmatched = [], []
    #: Why activations have no partner -> in which stages.
    split: dict[str, list[str]] = {}
    for stage in results.stages():
        summary = results.summary(TARGET, stage)
        if summary is None or of_key_data_alone(summary):
            continue
        if not summary["compared"]:
            poor.append(f"{stage}: nothing was compared")
        finding = step.findings.get(stage)
        if finding is not None and finding.stage.misplaced in _SPLIT:
            split.setdefault(finding.stage.misplaced, []).append(stage)
            continue
        for side in ("benchmark", "target"):
            share = summary["coverage"][side]
            if summary["compared"] and share < results.plan.coverage:
                poor.append(f"{stage}: {share:.1%} of the {side}'s records")
            names = summary["unmatched"][side]
            if names:
                unmatched.append(f"{stage}, {side} only: {listed(names, 2)}")
    shares = coverage(results)
    text = (
        f"{shares['benchmark']:.1%} of the benchmark's and {shares['target']:.1%} of the target's"
    )
    if poor:
        return shut(
            COVERAGE,
            f"too little was compared (at least {results.plan.coverage:.0%} is asked for): "
            f"{listed(poor, 6)}",
            "capture both sides with the same engine, level and stages; summary.json lists what "
            "is unmatched",
        )
    if not any((results.summary(TARGET, s) or {}).get("compared") for s in results.stages()):
        return shut(COVERAGE, "nothing was compared", "see the logs of the runs and of compare")
    apart = "; ".join(f"{why} in {listed(where, 6)}" for why, where in split.items())
    if split and not any(finding.records for finding in step.findings.values()):
        return shut(
            COVERAGE,
            f"{apart}, and nothing was captured that does not depend on it",
            "use the same micro-batch sizes and data-parallel ranks on both sides, or capture an "
            "update stage or key data",
        )
    if split:
        return caveat(
            COVERAGE,
            f"{apart}: activations have no partner there, and "
            "gradients, changes and key data were judged alone",
            "use the same micro-batch sizes and data-parallel ranks on both sides to see where a "
            "difference begins",
        )
    text += " records were measured"
    blocks = _recomposed(step)
    if blocks:
        text += (
            f"; {listed(blocks, 2)} agree and hold their rows in another order or number inside, "
            "where nothing was judged"
        )
    if unmatched:
        text += f"; without partner: {listed(unmatched, 4)}"
    if blocks or unmatched:
        return caveat(
            COVERAGE,
            text,
            "use the same implementation of these blocks on both sides to see inside"
            if blocks
            else "records without partner were not judged",
        )
    return opened(COVERAGE, text)


def _recomposed(step: Step) -> list[str]:
    """Blocks inside which rows stand otherwise (:mod:`rlprobe.judge.excuses.recomposed`)."""
    processes = [p for finding in step.findings.values() for p in finding.stage.processes]
    return sorted({block for process in processes for block in process.recomposed})


def _capture(evidence: Evidence) -> GateItem:
    sides = [
        run.manifest.declared.get("capture") or {} for run in (evidence.benchmark, evidence.target)
    ]
    keys = ("engine", "level", "task", "summary_mode", "sketch")
    found = [
        f"{key}: {sides[0].get(key)} -> {sides[1].get(key)}"
        for key in keys
        if sides[0].get(key) != sides[1].get(key)
    ]
    engines = {str(side.get("engine", "?")) for side in sides}
    if found:
        return caveat(
            CAPTURE,
            f"captured differently: {listed(found, 5)}",
            "msprobe's L0 hooks change fp32 gradients by themselves: use one engine on both sides",
        )
    if all(side.get("task") == "statistics" and not side.get("sketch") for side in sides):
        return caveat(
            CAPTURE,
            "statistics without sketches: errors are lower bounds, and a permutation is invisible",
            "capture with sketches (capture.sketch) or tensors",
        )
    what = "tensors" if sides[0].get("task") == "tensor" else "statistics and sketches"
    observed = ""
    if "msprobe" in engines and sides[0].get("level") != "L1":
        observed = f"; {OBSERVER}"
    return opened(CAPTURE, f"{', '.join(sorted(engines))} engine on both sides, {what}{observed}")


def _repeats(results: Results) -> GateItem:
    said, uneasy = [], False
    for pair, what in ((REPEAT, "benchmark"), (REPEAT_TARGET, "target")):
        if pair not in results.plan.pairs:
            continue
        summaries = [results.summary(pair, stage) for stage in results.stages(pair)]
        known = [summary for summary in summaries if summary is not None and summary["compared"]]
        if len(known) < len(summaries) or not known:
            uneasy = True
            said.append(f"the {what}'s repeat could not be compared in all stages")
            continue
        compared = sum(summary["compared"] for summary in known)
        identical = sum(summary["identical"] for summary in known)
        unseen = sum(summary.get("no_difference_seen", 0) for summary in known)
        largest = max((summary["max_error"] or 0.0) for summary in known)
        if identical == compared:
            said.append(f"the {what} repeats itself exactly ({compared} records)")
        elif identical + unseen == compared:
            said.append(
                f"the {what} repeats itself: {identical} of {compared} records identical, no "
                "difference seen in the others"
            )
        else:
            uneasy = True
            said.append(
                f"the {what} does not repeat itself exactly: {identical} of {compared} records "
                f"identical, largest difference {largest:.2g}"
            )
    if not said:
        return caveat(
            CONTROL,
            "no device was run twice, so its own randomness is unknown",
            "switch a repeat on (controls.repeat, controls.repeat_target)",
        )
    if uneasy:
        return caveat(
            CONTROL, "; ".join(said), "the floor is raised to twice what a repeat differs by"
        )
    return opened(CONTROL, "; ".join(said))
