"""Stages, steps, coverage, engines and controls: whether there is enough to judge by."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rlprobe.compare import measures
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, caveat, opened, shut
from rlprobe.dumps.results import Summary, of_key_data_alone
from rlprobe.judge.analysis import Step
from rlprobe.judge.excuses import positions
from rlprobe.judge.inputs import Results
from rlprobe.judge.stage import Stage
from rlprobe.roles import REPEAT, REPEAT_TARGET, TARGET
from rlprobe.said import COMMA, NOTHING_SAID, SEMICOLON, Said, joined, listed, of_side, say
from rlprobe.stages import GENERATE

STAGES, COVERAGE, CAPTURE, CONTROL = "stages and steps", "coverage", "capture", "repeats"
#: What msprobe does to what it watches at L0 and mix; `make contract` measures it on real verl.
OBSERVER = say(
    "its module hooks add autograd nodes, by which fp32 gradients differ from an unwatched run's "
    "by up to 1e-6 of their norm, on both sides alike"
)


_LONE = {measures.BENCHMARK_ONLY, measures.TARGET_ONLY}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_SPLIT = (
    positions.SPREAD,
    positions.SPLIT,
    positions.SHAPED,
    positions.UNTOLD,
    positions.SHUFFLED,
)


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
                problems.append(
                    say("{side} did not capture {stage}", side=of_side(side), stage=stage)
                )
            elif evidence.step.number not in found.steps:
                problems.append(
                    say(
                        "{side} has no step {number} of {stage}",
                        side=of_side(side),
                        number=evidence.step.number,
                        stage=stage,
                    )
                )
    for stage in wanted:
        if results.summary(TARGET, stage) is None:
            problems.append(say("{stage} was not compared", stage=stage))
    steps = [set(run.manifest.steps) for run in (evidence.benchmark, evidence.target)]
    if problems:
        return shut(
            STAGES,
            listed(problems, 6),
            say("see the run's log: a stage that did not run cannot agree; then run it again"),
        )
    if not wanted:
        return shut(
            STAGES, say("no stage was planned to be compared"), say("capture at least one stage")
        )
    if steps[0] != steps[1]:
        return caveat(
            STAGES,
            say(
                "benchmark has steps {benchmark}, target {target}",
                benchmark=sorted(steps[0]),
                target=sorted(steps[1]),
            ),
            say("capture the same steps on both sides"),
        )
    if evidence.target.is_joined:
        return opened(
            STAGES,
            say(
                "{count} stages, steps {steps} on both sides, each judged: later ones begin from "
                "the benchmark's state",
                count=len(wanted),
                steps=sorted(steps[0]),
            ),
        )
    if len(steps[0]) > 1:
        return caveat(
            STAGES,
            say(
                "{count} stages, steps {steps} on both sides, of which step {number} is "
                "judged: later ones inherit what updates differ by",
                count=len(wanted),
                steps=sorted(steps[0]),
                number=evidence.step.number,
            ),
            say(
                "to have each step judged, set controls.rejoin: true; without it the report shows "
                "trends"
            ),
        )
    return opened(
        STAGES,
        say(
            "{count} stages, steps {steps} on both sides", count=len(wanted), steps=sorted(steps[0])
        ),
    )


def coverage(results: Results) -> dict[str, float]:
    """Share of each side's records that were measured, over all stages of the target's pair."""
    totals = {"benchmark": [0.0, 0.0], "target": [0.0, 0.0]}
    for stage in results.stages():
        summary = results.summary(TARGET, stage)
        if summary is None or is_lone_generation(stage, summary):
            continue
        for side, (measured, records) in totals.items():
            share = _share(summary, side)
            compared = summary.compared + summary.counts.get(measures.DTYPE, 0)
            totals[side] = [measured + compared, records + (compared / share if share else 0.0)]
            if not share:
                totals[side][1] += float(summary.records)
    return {side: (m / n if n else 0.0) for side, (m, n) in totals.items()}


def is_lone_generation(stage: str, summary: Summary) -> bool:
    """Whether a stage is generation that one side alone recorded.

    It is no lack, as comparing has it: a replay does not generate. What stages there are is said
    by the item of that name.
    """
    there = {status for status, count in summary.counts.items() if count}
    return stage == GENERATE and len(there) == 1 and there <= _LONE


def _share(summary: Summary, side: str) -> float:
    """Share of a side's records that were measured, those of another format included.

    A comparison does not count these; an alignment judges them, and that they are there is its
    finding, not a lack of anything to compare.
    """
    share = summary.coverage.get(side, 0.0)
    compared = float(summary.compared)
    if not (share and compared):
        return share
    others = float(summary.counts.get(measures.DTYPE, 0))
    return min(1.0, share * (compared + others) / compared)


def coverage_item(results: Results, step: Step) -> GateItem:
    """Whether enough of both sides' records was measured."""
    poor, unmatched, laid_out = [], [], []
    #: Why activations have no partner -> in which stages.
    split: dict[Said, list[str]] = {}
    for stage in results.stages():
        summary = results.summary(TARGET, stage)
        if summary is None or of_key_data_alone(summary) or is_lone_generation(stage, summary):
            continue
        finding = step.findings.get(stage)
        if finding is not None and finding.stage.laid_out is not None:
            laid_out.append(_laid_out(stage, finding.stage))
            poor += _poor(stage, finding.stage, results.plan.coverage)
            continue
        if not summary.compared:
            poor.append(say("{stage}: nothing was compared", stage=stage))
        if finding is not None and finding.stage.misplaced in _SPLIT:
            split.setdefault(finding.stage.misplaced, []).append(stage)
            continue
        for side in ("benchmark", "target"):
            share = _share(summary, side)
            if summary.compared and share < results.plan.coverage:
                poor.append(
                    say(
                        "{stage}: {share:.1%} of the {side}'s records",
                        stage=stage,
                        share=share,
                        side=of_side(side),
                    )
                )
            names = summary.unmatched.get(side)
            if names:
                unmatched.append(
                    say(
                        "{stage}, {side} only: {names}",
                        stage=stage,
                        side=of_side(side),
                        names=listed(names, 2),
                    )
                )
    shares = coverage(results)
    if poor:
        return shut(
            COVERAGE,
            say(
                "too little was compared (at least {coverage:.0%} is asked for): {poor}",
                coverage=results.plan.coverage,
                poor=listed(poor, 6),
            ),
            say(
                "capture both sides with the same engine, level and stages; summary.json "
                "lists what is unmatched"
            ),
        )
    compared = any(
        (said := results.summary(TARGET, s)) is not None and said.compared for s in results.stages()
    )
    if not (compared or laid_out):
        return shut(
            COVERAGE, say("nothing was compared"), say("see the logs of the runs and of compare")
        )
    if laid_out:
        return caveat(
            COVERAGE,
            joined(laid_out, SEMICOLON),
            say(
                "one record per module stands for all its calls of a stage: to see calls and "
                "micro-batches, lay both sides out alike"
            ),
        )
    apart = joined(
        (say("{why} in {where}", why=why, where=listed(where, 6)) for why, where in split.items()),
        SEMICOLON,
    )
    if split and not any(finding.records for finding in step.findings.values()):
        return shut(
            COVERAGE,
            say("{apart}, and nothing was captured that does not depend on it", apart=apart),
            say(
                "use the same micro-batch sizes and data-parallel ranks on both sides, or "
                "capture an update stage or key data"
            ),
        )
    if split:
        return caveat(
            COVERAGE,
            say(
                "{apart}: activations have no partner there, and gradients, changes and "
                "key data were judged alone",
                apart=apart,
            ),
            say(
                "use the same micro-batch sizes and data-parallel ranks on both sides to "
                "see where a difference begins"
            ),
        )
    text = say(
        "{benchmark:.1%} of the benchmark's and {target:.1%} of the target's records were measured",
        benchmark=shares["benchmark"],
        target=shares["target"],
    )
    blocks = _recomposed(step)
    if blocks:
        text += say(
            "; {blocks} agree and hold their rows in another order or number inside, "
            "where nothing was judged",
            blocks=listed(blocks, 2),
        )
    if unmatched:
        text += say("; without partner: {unmatched}", unmatched=listed(unmatched, 4))
    if blocks or unmatched:
        return caveat(
            COVERAGE,
            text,
            say("use the same implementation of these blocks on both sides to see inside")
            if blocks
            else say("records without partner were not judged"),
        )
    return opened(COVERAGE, text)


def _laid_out(stage: str, judged: Stage) -> Said:
    """What stands for a stage whose sides are laid out otherwise."""
    records = judged.logical
    said = say("{stage}: {why}", stage=stage, why=judged.laid_out)
    if records is None:
        return said
    said += say(
        "; {paired:,} of {shared:,} records of modules that both sides have were compared over "
        "the whole stage, by sample, position and feature",
        paired=records.paired,
        shared=records.shared,
    )
    if records.strange:
        said += say("; {count:,} are of other samples on both sides", count=records.strange)
    for side, modules in records.alone.items():
        if modules:
            said += say(
                "; modules of the {side} only: {modules}",
                side=of_side(side),
                modules=listed(kinds_of(modules), 4),
            )
    return said


def kinds_of(modules: Iterable[str]) -> list[str]:
    """Modules without the numbers of their layers, each once."""
    return list(dict.fromkeys(_NUMBER.sub(".*", module) for module in modules))


def _poor(stage: str, judged: Stage, wanted: float) -> list[Said]:
    records = judged.logical
    # of other samples: nothing to be compared, and no lack of anything that was captured
    held = 0 if records is None else records.shared - records.strange
    share = records.paired / held if records is not None and held else 1.0
    if share >= wanted:
        return []
    return [
        say(
            "{stage}: {share:.1%} of the records that stand for whole stages", stage=stage,
            share=share,
        )
    ]  # fmt: skip


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
            say("captured differently: {found}", found=listed(found, 5)),
            say(
                "msprobe's L0 hooks change fp32 gradients by themselves: use one engine on "
                "both sides"
            ),
        )
    if all(side.get("task") == "statistics" and not side.get("sketch") for side in sides):
        return caveat(
            CAPTURE,
            say(
                "statistics without sketches: errors are lower bounds, and a permutation "
                "is invisible"
            ),
            say("capture with sketches (capture.sketch) or tensors"),
        )
    what = say("tensors") if sides[0].get("task") == "tensor" else say("statistics and sketches")
    observed = NOTHING_SAID
    if "msprobe" in engines and sides[0].get("level") != "L1":
        observed = SEMICOLON + OBSERVER
    return opened(
        CAPTURE,
        say(
            "{engines} engine on both sides, {what}{observed}",
            engines=joined(sorted(engines), COMMA),
            what=what,
            observed=observed,
        ),
    )


def _repeats(results: Results) -> GateItem:
    said, uneasy = [], False
    for pair, what in ((REPEAT, "benchmark"), (REPEAT_TARGET, "target")):
        if pair not in results.plan.pairs:
            continue
        summaries = [results.summary(pair, stage) for stage in results.stages(pair)]
        known = [summary for summary in summaries if summary is not None and summary.compared]
        if len(known) < len(summaries) or not known:
            uneasy = True
            said.append(
                say("the {what}'s repeat could not be compared in all stages", what=of_side(what))
            )
            continue
        compared = sum(summary.compared for summary in known)
        identical = sum(summary.identical for summary in known)
        unseen = sum(summary.no_difference_seen for summary in known)
        largest = max((summary.max_error or 0.0) for summary in known)
        if identical == compared:
            said.append(
                say(
                    "the {what} repeats itself exactly ({compared} records)",
                    what=of_side(what),
                    compared=compared,
                )
            )
        elif identical + unseen == compared:
            said.append(
                say(
                    "the {what} repeats itself: {identical} of {compared} records identical, "
                    "no difference seen in the others",
                    what=of_side(what),
                    identical=identical,
                    compared=compared,
                )
            )
        else:
            uneasy = True
            said.append(
                say(
                    "the {what} does not repeat itself exactly: {identical} of {compared} "
                    "records identical, largest difference {largest:.2g}",
                    what=of_side(what),
                    identical=identical,
                    compared=compared,
                    largest=largest,
                )
            )
    if not said:
        return caveat(
            CONTROL,
            say("no device was run twice, so its own randomness is unknown"),
            say("switch a repeat on (controls.repeat, controls.repeat_target)"),
        )
    if uneasy:
        return caveat(
            CONTROL,
            joined(said, SEMICOLON),
            say("the floor is raised to twice what a repeat differs by"),
        )
    return opened(CONTROL, joined(said, SEMICOLON))
