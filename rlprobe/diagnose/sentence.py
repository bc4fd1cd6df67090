"""The verdict in one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
from rlprobe.judge.forced import PREFILL, Choices
from rlprobe.judge.inputs import Plan
from rlprobe.judge.outcomes import OTHER_FORMAT, SINGLE_VALUE
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import (
    COMMA,
    NOTHING_SAID,
    SEMICOLON,
    STOP,
    Message,
    Said,
    exactly,
    joined,
    of_side,
    restored,
    say,
    term,
)
from rlprobe.terminal import spelled


def aligned(
    plan: Plan,
    stages: list[StageResult],
    largest: float,
    unused: int,
    caveats: int,
    steps: Sequence[int],
    later: int,
) -> Said:
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
    given = {"name": plan.name, "sides": _sides(plan), "stages": _stages(len(judged)),
             "largest": largest}  # fmt: skip
    text = (
        say(
            "{name}: {sides} agree. 1 record of {stages} lies within its noise floor, the nearest "
            "at {largest:.2g} of it",
            **given,
        )
        if records == 1
        else say(
            "{name}: {sides} agree. {records:,} records of {stages} lie within their noise floor, "
            "the nearest at {largest:.2g} of it",
            records=records,
            **given,
        )
    )
    if unused == 1:
        text += say("; 1 more differs only at positions that no result depends on (padding)")
    elif unused:
        text += say(
            "; {count:,} more differ only at positions that no result depends on (padding)",
            count=unused,
        )
    if caveats == 1:
        text += say("; one caveat")
    elif caveats:
        text += say("; {count} caveats", count=caveats)
    text += STOP
    if later:
        more = (
            say("one later step gives")
            if later == 1
            else say("{count} later steps give", count=later)
        )
        text += say(" Only {steps} was judged; {more} trends.", steps=of_steps(steps), more=more)
    elif len(steps) > 1:
        text += say(
            " Steps {steps} were judged, each from the benchmark's state.", steps=_numbers(steps)
        )
    return text


def of_steps(steps: Sequence[int]) -> Said:
    """:func:`rlprobe.terminal.spelled`, in both languages."""
    if len(steps) == 1:
        return say("step {step}", step=steps[0])
    return say("steps {steps}", steps=_numbers(steps))


def _numbers(steps: Sequence[int]) -> Said:
    """Several steps by their numbers: ``0 and 2``, ``0 to 19``."""
    text = spelled(steps).removeprefix("steps ").removeprefix("step ")
    before, _, last = text.rpartition(" and ")
    parts = [_range(part) for part in [*before.split(", "), last] if part]
    if len(parts) == 1:
        return parts[0]
    return say("{before} and {last}", before=joined(parts[:-1], COMMA), last=parts[-1])


def _range(text: str) -> Said:
    first, to, last = text.partition(" to ")
    return say("{first} to {last}", first=first, last=last) if to else exactly(text)


def _stages(count: int) -> Said:
    return say("{count} stage", count=count) if count == 1 else say("{count} stages", count=count)


#: How a cause is known, as the sentence begins that says it.
_KNOWN = {
    OBSERVED: say("Cause, observed"),
    REPRODUCED: say("Cause, reproduced"),
    CONSISTENT: say("The numbers are consistent with this"),
}
_UNKNOWN = say(" Its cause is not known.")
#: What of a record is beyond its floor, where it is not its elements one by one.
_WORDS = {
    NORM: say("norm"),
    DENSE: say("part that all elements share"),
    SINGLE_VALUE: say("value that is farthest off"),
}


def _size(error: float, about: bool) -> Said:
    return say("about {size:.2g}", size=error) if about else exactly(f"{error:.2g}")


def diverged(
    plan: Plan,
    first: First,
    trainer_step: int | None,
    measure: Measure,
    excess: float | None,
    cause: Cause,
    before: Sequence[int] = (),
) -> Said:
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
    where = say("in the {operator}", operator=first.operator)
    if first.module:
        where = say("at {module} ({operator})", module=first.module, operator=first.operator)
    if first.phase is not None:
        where += _phase(first.phase, first.token)
    step = say("step {step}", step=first.step)
    if trainer_step is not None:
        step += say(" (trainer's {trainer_step})", trainer_step=trainer_step)
    size = NOTHING_SAID
    if measure.name == OTHER_FORMAT and measure.error is not None:
        size = say(
            ", error {error:.2g}, within its noise floor and in another format than was asked for",
            error=measure.error,
        )
    elif measure.error is not None and excess is not None:
        what = say("error")
        if measure.name != ELEMENTS:
            what = say("error of the {what}", what=_WORDS[measure.name])
        size = say(
            ", {what} {error}, {times} its noise floor",
            what=what,
            error=_size(measure.error, measure.about),
            times=_times(excess),
        )
    text = say(
        "{name}: {sides} part in {stage}, {step}, {where}{size}",
        name=plan.name,
        sides=_sides(plan),
        stage=first.stage,
        step=step,
        where=where,
        size=size,
    )
    text += STOP + why(cause)
    if len(before) == 1:
        text += say(" Step {step} before it agrees.", step=before[0])
    elif before:
        text += say(" Steps {steps} before it agree.", steps=_numbers(before))
    return text


def _phase(phase: str, token: int | None) -> Said:
    """Which forward of an engine, after where it is."""
    if phase == "decode" and token is not None:
        return say(" when token {token} of a response is decoded", token=token)
    if phase == "decode":
        return say(" when responses are decoded")
    if phase == "prompt":
        return say(" in a prompt's forward")
    return say(" in the prefill of prompt and response")


def of_choices(found: Sequence[Choices]) -> Said:
    """Where engines that were led through the same responses would have chosen other tokens.

    Args:
        found: of each phase; empty where no engine was led.
    """
    said = NOTHING_SAID
    for choices in found:
        near = sum(parting.near_tie for parting in choices.partings)
        if not choices.partings:
            continue
        where = say("prefill") if choices.phase == PREFILL else say("decoding")
        said += say(
            " In {where} the engines would choose another token at {count} of {tokens:,} places, "
            "{near} of them near ties.",
            where=where,
            count=len(choices.partings),
            tokens=choices.tokens,
            near=near,
        )
    return said


def why(cause: Cause, messages: Mapping[str, Message] = {}) -> Said:
    """What is said of the cause, as the end of the sentence.

    Args:
        cause: it.
        messages: how its sentences were made, where it was read from a file.
    """
    if cause.known == UNKNOWN:
        return _UNKNOWN
    statement = cause.statement
    return say(
        " {known}: {statement}.",
        known=_KNOWN[cause.known],
        statement=statement if isinstance(statement, Said) else restored(statement, messages),
    )


def left(plan: Plan, step: int, trainer_step: int | None, curve: Curve, said: Said) -> Said:
    """No record parts, and a metric of the trainer leaves what chaos, or its records, make.

    Args:
        plan: the alignment.
        step: where it leaves, from 0.
        trainer_step: the trainer's own number of that step, where known.
        curve: the metric that leaves first.
        said: by how much, in words.
    """
    where = say("step {step}", step=step)
    if trainer_step is not None:
        where += say(" (trainer's {trainer_step})", trainer_step=trainer_step)
    if curve.by == "records":
        return say(
            "{name}: {sides} agree in every record that was judged, and not in {metric}, which the "
            "trainer reports of {where}: {said}.",
            name=plan.name,
            sides=_sides(plan),
            metric=curve.metric,
            where=where,
            said=said,
        )
    return say(
        "{name}: {sides} part in the trainer's curves: {metric} leaves what chaos makes at "
        "{where}, {said}. No record that was judged differs.",
        name=plan.name,
        sides=_sides(plan),
        metric=curve.metric,
        where=where,
        said=said,
    )


def of_curves(found: Sequence[Curve], controls: int) -> Said:
    """What was found of the trainer's curves, to stand after a verdict; empty where one step ran.

    Args:
        found: every metric.
        controls: how many perturbed controls there were.
    """
    steps = max((curve.steps for curve in found), default=0)
    if steps < 2:
        return NOTHING_SAID
    # what a judged step's records say of a metric is no verdict on its curve
    counts = Counter[str](curve.verdict for curve in found if curve.by != "records")
    apart = sum(curve.by == "records" and curve.verdict == LEFT for curve in found)
    metrics = say("1 metric") if len(found) == 1 else say("{count} metrics", count=len(found))
    if not counts[WITHIN] and not counts[LEFT]:
        text = say(
            " Curves of {metrics} over {steps} steps: not judged ({why}).",
            metrics=metrics,
            steps=steps,
            why=_why(found, controls),
        )
        return text + _apart(apart)
    runs = (
        say("1 perturbed run") if controls == 1 else say("{count} perturbed runs", count=controls)
    )
    text = say(
        " Curves over {steps} steps against {runs}: {within} of {metrics} within",
        steps=steps,
        runs=runs,
        within=counts[WITHIN],
        metrics=metrics,
    )
    if counts[LEFT]:
        text += say(", {count} left", count=counts[LEFT])
    if counts[NOT_JUDGED]:
        text += say(", {count} not judged", count=counts[NOT_JUDGED])
    return text + STOP + _apart(apart)


def _apart(count: int) -> Said:
    """Metrics of judged steps that differ by more than what they are made of."""
    if not count:
        return NOTHING_SAID
    if count == 1:
        return say(" 1 of them differs in a judged step by more than what it is made of explains.")
    return say(
        " {count} of them differ in a judged step by more than what they are made of explains.",
        count=count,
    )


def _why(found: Sequence[Curve], controls: int) -> Said:
    """Why no curve was judged."""
    own = [curve.why for curve in found if curve.by != "records"]
    if own and all(why == JOINED for why in own):
        return JOINED
    return NO_CONTROL if not controls else say("too few perturbed controls are there")


def extent(judged: Extent) -> Said:
    """How much was judged, to stand after a verdict; empty where all was."""
    if judged.judged == judged.recorded:
        return NOTHING_SAID
    return say(
        " Judged: {judged:,} of {recorded:,} recorded quantities.",
        judged=judged.judged,
        recorded=judged.recorded,
    )


def not_comparable(plan: Plan, shut: list[GateItem]) -> Said:
    """The gate is shut."""
    reasons = joined(
        (
            say("{item}: {evidence}", item=term(item.item), evidence=item.evidence)
            for item in shut[:2]
        ),
        SEMICOLON,
    )
    more = NOTHING_SAID
    if len(shut) == 3:
        more = say(" (and 1 more reason)")
    elif len(shut) > 3:
        more = say(" (and {count} more reasons)", count=len(shut) - 2)
    return say(
        "{name}: no verdict, the runs cannot be compared. {reasons}{more}.",
        name=plan.name,
        reasons=reasons,
        more=more,
    )


def _sides(plan: Plan) -> Said:
    def side(role: str) -> Said:
        run = plan.runs.get(role)
        if run is None:
            return of_side(role)
        return say(
            "{role} ({device}, {precision})",
            role=of_side(role),
            device=run.device,
            precision=run.precision,
        )

    return say("{target} and {benchmark}", target=side(TARGET), benchmark=side(BENCHMARK))


def _times(excess: float) -> Said:
    if excess == float("inf"):
        return say("where there is no round-off; beyond")
    if excess >= 10:
        return say("{excess:,.0f} times", excess=excess)
    return say("{excess:.1f} times", excess=excess)
