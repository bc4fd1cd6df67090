"""Differences that later operators undo: what the suspect hands out does not depend on them.

A scale that one side puts to queries and the other to scores makes other queries and the same
scores: which of the two places it stands in is no cause. What a difference has made is followed
from operator to operator, up to where both sides' numbers agree again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlprobe.refine import meaning
from rlprobe.refine.both import differ
from rlprobe.refine.difference import IMPLEMENTATION, Difference
from rlprobe.refine.pairing import Apart, Both
from rlprobe.refine.trace import Operator, Trace, Value, error
from rlprobe.said import say

Traces = tuple[Trace, Trace]


def without(
    found: Sequence[Difference], steps: Sequence[Both | Apart], traces: Traces, floor: float
) -> list[Difference]:
    """Differences, of which none before the first that results depend on has an effect.

    Args:
        found: in the order of what ran.
        steps: the operators of both sides.
        traces: the benchmark's and the target's.
        floor: relative difference of values that agree again.
    """
    every = list(found)
    if traces[0].kind == "update" or not all(trace.outputs for trace in traces):
        return every
    for place, difference in enumerate(every):
        if not difference.effective:
            continue
        if difference.at is None or not _is_undone(difference.at, steps, traces, floor):
            break
        said = say("{said}; later operators undo that", said=difference.said)
        every[place] = replace(difference, said=said, effective=False, undone=True)
    return [_of_factor(d, steps) for d in every]


@dataclass
class _Changed:
    """What a difference has changed on one side, so far."""

    values: set[int] = field(default_factory=set)
    #: Memory that was written to: any view of it may hold what was.
    storages: set[int] = field(default_factory=set)
    #: Gradients among them that no operator was given yet.
    open: dict[int, Value] = field(default_factory=dict)

    def holds(self, value: Value) -> bool:
        return value.value in self.values or value.storage in self.storages

    def take(self, op: Operator, value: Value) -> None:
        self.values.add(value.value)
        if any(value.storage == given.storage for given in op.inputs):
            self.storages.add(value.storage)
        if op.direction != "forward":
            self.open[value.value] = value

    def drop(self, value: Value) -> None:
        self.values.discard(value.value)
        self.open.pop(value.value, None)


def _is_undone(at: int, steps: Sequence[Both | Apart], traces: Traces, floor: float) -> bool:
    """Whether nothing of what a step changed is left in outputs, or in gradients at the end."""
    changed = _Changed(), _Changed()
    _follow(steps[at], changed, floor, first=True)
    if not any(own.values for own in changed):
        return False  # less than that, and a difference all the same
    for step in steps[at + 1 :]:
        _follow(step, changed, floor)
    outputs = zip(traces[0].outputs, traces[1].outputs, strict=False)
    whole = len(traces[0].outputs) == len(traces[1].outputs)
    ends = [_ends(steps, side) for side in (0, 1)]
    return (
        whole
        and all(not _holds(pair, changed) or _agree(*pair, floor) for pair in outputs)
        and all(_are_among(own.open.values(), ends[1 - side], floor)
                for side, own in enumerate(changed))
    )  # fmt: skip


def _ends(steps: Sequence[Both | Apart], side: int) -> list[Value]:
    """Gradients of one side that no operator is given: where its backward pass ends."""
    found: dict[int, Value] = {}
    for step in steps:
        ran = (step.benchmark, step.target)[side]
        for op in [ran] if isinstance(ran, Operator) else ran:
            for value in op.inputs:
                found.pop(value.value, None)
            if op.direction != "forward":
                found.update({value.value: value for value in op.outputs})
    return list(found.values())


def _holds(pair: tuple[Value, Value], changed: tuple[_Changed, _Changed]) -> bool:
    return any(own.holds(value) for own, value in zip(changed, pair, strict=True))


def _are_among(values: Iterable[Value], ends: Sequence[Value], floor: float) -> bool:
    """Whether gradients that end on one side, which nothing pairs, end on the other as well."""
    rest = list(ends)
    for one in values:
        other = next((v for v in rest if v.shape == one.shape and _agree(one, v, floor)), None)
        if other is None:
            return False
        rest.remove(other)
    return True


def _follow(
    step: Both | Apart, changed: tuple[_Changed, _Changed], floor: float, first: bool = False
) -> None:
    if isinstance(step, Apart):
        for own, side in zip(changed, (step.benchmark, step.target), strict=True):
            for op in side:
                used = any(map(own.holds, op.inputs))
                _close(op, own)
                for value in op.outputs if used or first else ():
                    own.take(op, value)
        return
    b, t = step.benchmark, step.target
    given = zip(b.inputs, t.inputs, strict=False)
    # what was changed and is the same again makes no other
    used = any(_holds(pair, changed) and not _agree(*pair, floor) for pair in given)
    for op, own in zip((b, t), changed, strict=True):
        _close(op, own)
    whole = len(b.outputs) == len(t.outputs)
    pairs = zip(b.outputs, t.outputs, strict=False)
    agrees = [whole and _agree(one, other, floor) for one, other in pairs]
    for op, own in zip((b, t), changed, strict=True):
        for place, value in enumerate(op.outputs):
            if place < len(agrees) and agrees[place]:
                own.drop(value)
            elif used or first or len(b.inputs) != len(t.inputs):
                own.take(op, value)


def _close(op: Operator, own: _Changed) -> None:
    for value in op.inputs:
        own.open.pop(value.value, None)


def _agree(one: Value, other: Value, floor: float) -> bool:
    """Whether two values are known to agree."""
    return error(one, other) is not None and not differ(one, other, 0.0, floor)


def _of_factor(difference: Difference, steps: Sequence[Both | Apart]) -> Difference:
    """A number that one side multiplies by has no effect of its own where it does so back, or the
    other side multiplies by it elsewhere."""
    if difference.cause != "constant_factor" or difference.at is None:
        return difference
    step = steps[difference.at]
    if not isinstance(step, Apart):
        return difference
    own = [_factors(side) for side in (step.benchmark, step.target)]
    others = [s for at, s in enumerate(steps) if isinstance(s, Apart) and at != difference.at]
    rest = [[f for s in others for f in _factors((s.benchmark, s.target)[side])] for side in (0, 1)]
    for side, mine in enumerate(own):
        back = [*(1 / f for f in rest[side]), *rest[1 - side]]
        if mine and all(any(math.isclose(f, g, rel_tol=1e-6) for g in back) for f in mine):
            return replace(difference, cause=IMPLEMENTATION)
    return difference


def _factors(operators: Sequence[Operator]) -> list[float]:
    """Numbers that operators multiply all of a tensor by."""
    found = []
    for op in operators:
        numbers = [a.scalar for a in op.arguments if not a.tensors and a.name == "other"]
        numbers += [(v.elements or [None])[0] for v in op.inputs if v.shape == []]
        given = [n for n in numbers if isinstance(n, (int, float)) and n and math.isfinite(n)]
        kind = meaning.plain(op)
        if op.direction == "forward" and kind in ("mul", "div") and len(given) == 1:
            found.append(float(given[0]) if kind == "mul" else 1 / float(given[0]))
    return found
