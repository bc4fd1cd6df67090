"""The verdict in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlprobe.diagnose.diagnosis import (
    CONSISTENT,
    OBSERVED,
    REPRODUCED,
    UNKNOWN,
    Cause,
    First,
    GateItem,
    StageResult,
)
from rlprobe.judge.curves import JOINED, LEFT, NO_CONTROL, NOT_JUDGED, WITHIN, Curve
from rlprobe.judge.decisive import DENSE, ELEMENTS, NORM, Measure
from rlprobe.judge.extent import Extent
from rlprobe.judge.inputs import Plan
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.terminal import counted, spelled


def aligned(
    plan: Plan,
    stages: list[StageResult],
    largest: float,
    unused: int,
    caveats: int,
    steps: Sequence[int],
    later: int,
) -> str:
    """The target agrees.

    Args:
        plan: the alignment.
        stages: what was found of each stage.
        largest: the nearest any record came to its floor.
        unused: records that differ only where no result looks, and are not among those of stages.
        caveats: how many there are.
        steps: the captured steps that were judged, from 0.
        later: captured steps after them, which were not.
    """
    judged = [s for s in stages if s.state == "aligned"]
    records = sum(s.records for s in judged)
    text = (
        f"{plan.name}: {_sides(plan)} agree. {counted(records, 'record')} of "
        f"{counted(len(judged), 'stage')} {'lies' if records == 1 else 'lie'} within "
        f"{'its' if records == 1 else 'their'} noise floor, the nearest at {largest:.2g} of it"
    )
    if unused:
        differ = "differs" if unused == 1 else "differ"
        text += f"; {unused:,} more {differ} only at positions that no result depends on (padding)"
    text = f"{text}; {_caveats(caveats)}." if caveats else f"{text}."
    if later:
        more = "one later step gives" if later == 1 else f"{later} later steps give"
        text += f" Only {spelled(steps)} was judged; {more} trends."
    elif len(steps) > 1:
        text += f" {spelled(steps).capitalize()} were judged, each from the benchmark's state."
    return text


#: How a cause is known, as the sentence begins that says it.
_KNOWN = {
    OBSERVED: "Cause, observed",
    REPRODUCED: "Cause, reproduced",
    CONSISTENT: "The numbers are consistent with this",
}
_UNKNOWN = " Its cause is not known."
#: What of a record is beyond its floor, where it is not its elements one by one.
_WORDS = {NORM: "norm", DENSE: "part that all elements share"}


def diverged(
    plan: Plan,
    first: First,
    trainer_step: int | None,
    measure: Measure,
    excess: float | None,
    cause: Cause,
    before: Sequence[int] = (),
) -> str:
    """The target parts from the benchmark.

    Args:
        plan: the alignment.
        first: where.
        trainer_step: the trainer's own number of that step.
        measure: what of the record is beyond its floor.
        excess: by how much.
        cause: why.
        before: steps before it that were judged, and agree.
    """
    where = f"at {first.module} ({first.operator})" if first.module else f"in the {first.operator}"
    step = f"step {first.step}"
    if trainer_step is not None:
        step += f" (trainer's {trainer_step})"
    size = ""
    if measure.error is not None and excess is not None:
        what = "error" if measure.name == ELEMENTS else f"error of the {_WORDS[measure.name]}"
        size = f", {what} {measure.error:.2g}, {_times(excess)} its noise floor"
    text = f"{plan.name}: {_sides(plan)} part in {first.stage}, {step}, {where}{size}.{why(cause)}"
    if before:
        agree = "agrees" if len(before) == 1 else "agree"
        text += f" {spelled(before).capitalize()} before it {agree}."
    return text


def why(cause: Cause) -> str:
    """What is said of the cause, as the end of the sentence."""
    if cause.known == UNKNOWN:
        return _UNKNOWN
    return f" {_KNOWN[cause.known]}: {cause.statement}."


def left(plan: Plan, step: int, trainer_step: int | None, curve: Curve, said: str) -> str:
    """No record parts, and a metric of the trainer leaves what chaos makes.

    Args:
        plan: the alignment.
        step: where it leaves, from 0.
        trainer_step: the trainer's own number of that step, where known.
        curve: the metric that leaves first.
        said: by how much, in words.
    """
    own = "" if trainer_step is None else f" (trainer's {trainer_step})"
    return (
        f"{plan.name}: {_sides(plan)} part in the trainer's curves: {curve.metric} leaves what "
        f"chaos makes at step {step}{own}, {said}. No record that was judged differs."
    )


def of_curves(found: Sequence[Curve], controls: int) -> str:
    """What was found of the trainer's curves, to stand after a verdict; empty where one step ran.

    Args:
        found: every metric.
        controls: how many perturbed controls there were.
    """
    steps = max((curve.steps for curve in found), default=0)
    if steps < 2:
        return ""
    counts = Counter[str](curve.verdict for curve in found)
    if not counts[WITHIN] and not counts[LEFT]:
        return (
            f" Curves of {counted(len(found), 'metric')} over {steps} steps: not judged ("
            + _why(found, controls)
            + ")."
        )
    text = (
        f" Curves over {steps} steps against {counted(controls, 'perturbed run')}: "
        f"{counts[WITHIN]} of {counted(len(found), 'metric')} within"
    )
    text += f", {counts[LEFT]} left" if counts[LEFT] else ""
    return text + (f", {counts[NOT_JUDGED]} not judged." if counts[NOT_JUDGED] else ".")


def _why(found: Sequence[Curve], controls: int) -> str:
    """Why no curve was judged."""
    if all(curve.why == JOINED for curve in found):
        return JOINED
    return NO_CONTROL if not controls else "too few perturbed controls are there"


def extent(judged: Extent) -> str:
    """How much was judged, to stand after a verdict; empty where all was."""
    if judged.judged == judged.recorded:
        return ""
    return f" Judged: {judged.judged:,} of {judged.recorded:,} recorded quantities."


def not_comparable(plan: Plan, shut: list[GateItem]) -> str:
    """The gate is shut."""
    reasons = "; ".join(f"{item.item}: {item.evidence}" for item in shut[:2])
    more = f" (and {counted(len(shut) - 2, 'more reason')})" if len(shut) > 2 else ""
    return f"{plan.name}: no verdict, the runs cannot be compared. {reasons}{more}."


def _sides(plan: Plan) -> str:
    def side(role: str) -> str:
        run = plan.runs.get(role)
        return f"{role} ({run.device}, {run.precision})" if run else role

    return f"{side(TARGET)} and {side(BENCHMARK)}"


def _caveats(count: int) -> str:
    return "one caveat" if count == 1 else f"{count} caveats"


def _times(excess: float) -> str:
    if excess == float("inf"):
        return "where there is no round-off; beyond"
    return f"{excess:,.0f} times" if excess >= 10 else f"{excess:.1f} times"
