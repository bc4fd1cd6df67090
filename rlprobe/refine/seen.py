"""What the operators' traces show, as a cause and in words."""

from __future__ import annotations

import math

import msgspec

from rlprobe.judge.origin import CLIPPING, LOSS, OPTIMIZER, REDUCTION, SETTING
from rlprobe.refine import trace
from rlprobe.refine.difference import COLLECTIVE, IMPLEMENTATION, Difference
from rlprobe.refine.observe import Observed
from rlprobe.refine.pairing import Both
from rlprobe.refine.suspects import Plan
from rlprobe.said import NOTHING_SAID, Said, say
from rlprobe.spec import Suspects


class Seen(msgspec.Struct, frozen=True):
    """A cause that the operators' trace or an experiment shows."""

    cause: str
    statement: str
    evidence: list[str]


def of_traces(watched: Observed, plan: Plan, suspects: Suspects) -> Seen:
    """The first operator that differs, or that none is seen to, and how much of that is known."""
    first = watched.first
    if first is None:
        also = [say("the traces differ in: {said}", said=d.said) for d in watched.differences]
        return Seen("unknown", "", [_none(watched, plan), *also])
    benchmark, target = watched.operators
    where = NOTHING_SAID
    if suspects.trace_module:
        where = say(" in {module}", module=suspects.trace_module)
    others = [d.said for d in watched.differences if d is not first]
    evidence = [
        say(
            "the traces of {benchmark} and {target} operators (benchmark and target){where} part "
            "at: {said}",
            benchmark=benchmark,
            target=target,
            where=where,
            said=first.said,
        ),
        *(say("the traces also differ in: {said}", said=said) for said in others),
        *(
            say("so do {count} further calls of {operator}", count=count - 1, operator=operator)
            for operator, count in watched.calls.items()
            if count > 1
        ),
    ]
    return Seen(_class(first, plan), first.said + where, [*evidence])


def _none(watched: Observed, plan: Plan) -> Said:
    """That no operator is seen to differ, with how much of that is known."""
    benchmark, target = watched.operators
    if any(d.undone for d in watched.differences):
        return say(
            "of {benchmark} and {target} operators traced on benchmark and target, those that "
            "differ change no number by more than {floor:.2g}, as much as results may differ, or "
            "later operators undo what they change",
            benchmark=benchmark,
            target=target,
            floor=plan.floor,
        )
    if watched.differences:
        return say(
            "of {benchmark} and {target} operators traced on benchmark and target, those that "
            "differ change no number by more than {floor:.2g}, as much as results may differ",
            benchmark=benchmark,
            target=target,
            floor=plan.floor,
        )
    if not watched.untold:
        return say(
            "of {benchmark} and {target} operators traced on benchmark and target, none differs by "
            "itself",
            benchmark=benchmark,
            target=target,
        )
    worst = max(watched.untold, key=_grown)
    return say(
        "of {benchmark} and {target} operators traced on benchmark and target, none is seen to "
        "differ by itself; of {count} that are given other numbers nothing tells what these make, "
        "first of all of {operator}, which makes about {made:.2g} of {given:.2g}",
        benchmark=benchmark,
        target=target,
        count=len(watched.untold),
        operator=worst.target.said,
        made=_most(worst.benchmark.outputs, worst.target.outputs),
        given=_most(worst.benchmark.inputs, worst.target.inputs),
    )


def _grown(step: Both) -> float:
    """By how much more the results of an operator differ than what it is given."""
    given = _most(step.benchmark.inputs, step.target.inputs)
    made = _most(step.benchmark.outputs, step.target.outputs)
    return made / given if given else made


def _most(one: list[trace.Value], other: list[trace.Value]) -> float:
    """The largest relative difference that is known."""
    sizes = [trace.error(v, w) for v, w in zip(one, other, strict=False)]
    return max((s for s in sizes if s is not None and math.isfinite(s)), default=0.0)


def _class(first: Difference, plan: Plan) -> str:
    """The class of a difference, where its place says more than that operators differ."""
    if first.kind == COLLECTIVE and plan.origin == REDUCTION:
        return "reduction"
    if first.cause == IMPLEMENTATION and first.kind != "kernel":
        return _OF_PLACES.get(plan.origin, first.cause)
    if first.cause in _OF_PARTS and first.kind == "operators":
        return _OF_PLACES.get(plan.origin, first.cause)
    return first.cause


#: What is done to a part of a loss or of an update: of the whole no law is known by that.
_OF_PARTS = ("constant_factor", "saturation", "layout")


#: The classes of other operators in the loss, and in clipping and optimizer: parameters change
#: otherwise there although their gradients agree.
_OF_PLACES = {LOSS: "loss", CLIPPING: "optimizer", OPTIMIZER: "optimizer", SETTING: "optimizer"}
