"""What two traces of the same suspect show: the first thing that differs, in words.

Sides are followed operator by operator. What a side was given is compared before what it made, so
that the first difference is a cause and not its consequence: an argument, a value that comes from
outside the trace, a format, an operator that only one side ran, or, with all of these alike, the
operator itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import (
    both,
    effect,
    idle,
    leads,
    meaning,
    settings,
    stepped,
    summed,
    undone,
    unwritten,
    vocabulary,
    wiring,
    written,
)
from rlprobe.refine.bounds import Bounds
from rlprobe.refine.difference import (
    CONSTANT,
    IMPLEMENTATION,
    VIEWS,
    WIRING,
    Difference,
    number,
)
from rlprobe.refine.pairing import Apart, Both, pair, reordered, scalars
from rlprobe.refine.stretch import Stretch
from rlprobe.refine.trace import ELSEWHERE, Operator, Trace, Value, taken
from rlprobe.said import Said, listed, of_side, say

#: Differences listed.
_MOST = 8
#: Kind of operators that only lay numbers out, on either side others.
_MOVES = "moves"
#: Operators of one stretch that are named.
_NAMED = 6


@dataclass
class Observed:
    """What the traces of the two sides show."""

    differences: list[Difference] = field(default_factory=list)
    operators: tuple[int, int] = (0, 0)
    #: Operators of both sides of which nothing tells whether they differ by themselves.
    untold: list[Both] = field(default_factory=list)
    #: Calls of operators that make something else, by operator.
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def first(self) -> Difference | None:
        """The first difference that changes numbers.

        Of views of the same that each side takes by other operators what these are given to tells.
        """
        effective = [d for d in self.differences if d.effective]
        if effective and (effective[0].kind, effective[0].cause) == (_MOVES, IMPLEMENTATION):
            return next((d for d in effective if d.kind in (VIEWS, WIRING)), effective[0])
        return effective[0] if effective else None


def observe(
    benchmark: Trace,
    target: Trace,
    noise: float = 0.0,
    floor: float | None = None,
    *,
    forward: bool = False,
) -> Observed:
    """Compare the traces of one suspect on two sides.

    Args:
        benchmark, target: the traces.
        noise: relative difference that agreeing values have by the time they enter the trace.
        floor: relative difference that results may have; None: as much as what enters.
        forward: whether the forward pass of a module differs already, so that what its backward
            pass does is a consequence.
    """
    floor = noise if floor is None else floor
    benchmark, target = summed.known(benchmark), summed.known(target)
    outside = written.Written((benchmark, target))
    benchmark, target = unwritten.known(benchmark), unwritten.known(target)
    sides = _with_modules(benchmark), _with_modules(target)
    live = [{op.n for op in trace.live()} for trace in (benchmark, target)]
    found = Observed(operators=(len(live[0]), len(live[1])))
    if target.kind == "update":
        found.differences += settings.differences(benchmark, target)
        found.differences += settings.counts(benchmark, target)
        # in the order they ran: gradients are added up before the step
        steps = reordered(pair(*(sorted(side, key=lambda op: op.n) for side in sides)))
    else:
        ways = (True,) if forward and target.kind == "module" else (True, False)
        steps = [s for way in ways for s in reordered(pair(*(_way(side, way) for side in sides)))]
    unused = idle.unused(benchmark, target), idle.unused(target, benchmark)
    ran = idle.Idle(benchmark), idle.Idle(target)
    wires = wiring.Wires(steps, floor, around=target.kind != "module")
    numbers = [_numbers_taken(trace) for trace in (benchmark, target)]
    collective: Operator | None = None
    bounds = Bounds()
    beside: list[Difference] = []
    for at, step in enumerate(steps):
        if isinstance(step, Apart):
            step = Apart(
                ran[1].without([op for op in step.benchmark if op.n in live[0] - unused[0]]),
                ran[0].without([op for op in step.target if op.n in live[1] - unused[1]]),
            )
            if not (step.benchmark or step.target):
                continue
            alike = _working(step.target) and not any(_unlike(step))
            if alike and found.first is not None:
                continue  # the same operators of other code, on what differs already
            used = _used(step, steps[at + 1 :], (benchmark, target))
            # where nothing that both sides run uses what they made, they may be a cause
            differs = not used or any(both.differ(one, other, 0.0, floor) for one, other in used)
            differs = differs or _writes_parameters(step, (benchmark, target))
            lone = _apart(step, (benchmark, target), used, differs, floor)
            _add(found, [lone], at)
            beside += [lone] if _writes_gradients(step, (benchmark, target)) else []
            collective = _last_collective(step.target, collective)
        else:
            other = both.counted(step, floor) or wires.difference(
                step, both.changes(step.benchmark, step.target, 0.0, 1.0, floor)
            )
            other = other or outside.difference(step)
            own = both.Beside(
                sides[1], numbers, collective, bounds, found.untold, target.kind != "module"
            )
            _add(found, [other] if other else both.differences(step, own, noise, floor), at)
            collective = _last_collective([step.target], collective)
    found.differences = settings.of_another_computation(
        found.differences,
        beside,
        lambda d, side: d.at is None or _working(_of_side(steps[d.at], side)),
        settings.left_out(benchmark, target),
    )
    again = min(floor, both.GROWTH * noise)
    found.differences = undone.without(found.differences, steps, (benchmark, target), again)
    found.differences = leads.told(found.differences, steps, target)
    return _of_constants(found, benchmark, target, floor)


def _of_constants(found: Observed, benchmark: Trace, target: Trace, floor: float) -> Observed:
    """What differs where no operator does: the one parameter or buffer that does.

    A constant may differ by less than results may, and make more of it.
    """
    lone = [d for d in found.differences if d.kind == CONSTANT]
    pairs = zip(benchmark.outputs, target.outputs, strict=False)
    if (
        found.first is None
        and len(lone) == 1
        and any(both.differ(b, t, 0.0, floor) for b, t in pairs)
    ):
        found.differences = [replace(d, effective=d is lone[0]) for d in found.differences]
    return found


def _are_given_from_elsewhere(trace: Trace, operators: list[Operator]) -> bool:
    """Whether operators are given computed numbers that their trace knows nothing of."""
    elsewhere = {
        v.value for op in trace.operators for v in op.inputs
        if v.origin == ELSEWHERE and math.prod(v.shape) > 1 and v.dtype in UNIT
    }  # fmt: skip
    return trace.kind != "update" and any(v.value in elsewhere for op in operators
                                          for v in op.inputs)  # fmt: skip


def _writes_parameters(step: Apart, traces: tuple[Trace, Trace]) -> bool:
    """Whether one side alone changes parameters, by however little of them.

    A step changes weights by a small part of them, so that floors of values do not hold there.
    """
    return any(stepped.writes_parameters(*own) for own in _alone(step, traces))


def _writes_gradients(step: Apart, traces: tuple[Trace, Trace]) -> bool:
    """Whether one side alone changes gradients before the step."""
    return any(stepped.writes_gradients(*own) for own in _alone(step, traces))


def _alone(step: Apart, traces: tuple[Trace, Trace]) -> list[tuple[Trace, list[Operator]]]:
    """What one side of an update alone computes, and its trace; nothing where both do."""
    sides = [
        (trace, [op for op in own if _working([op])])
        for trace, own in zip(traces, (step.benchmark, step.target), strict=True)
    ]
    lone = [(trace, own) for trace, own in sides if own]
    return lone if traces[0].kind == "update" and len(lone) == 1 else []


def _with_modules(trace: Trace) -> list[Operator]:
    """Operators that results depend on, and modules within, which ran whether they do or not."""
    live = trace.live()
    known = {op.n for op in live}
    dead = [op for op in trace.operators if op.name.startswith("module::") and op.n not in known]
    # forward first, as they are: what is inserted is forward
    forward = sorted([*dead, *(op for op in live if op.direction == "forward")], key=lambda o: o.n)
    return [*forward, *(op for op in live if op.direction != "forward")]


def _add(found: Observed, differences: list[Difference], at: int) -> None:
    """Take what is not said yet of a step; of what changes no number, half as much."""
    for difference in differences:
        if difference.of:
            found.calls[difference.of] += 1
            if found.calls[difference.of] > 1:
                continue
        listed = [d for d in found.differences if d.effective or not difference.effective]
        said = any(d.said == difference.said for d in found.differences)
        if not said and len(listed) < (_MOST if difference.effective else _MOST // 2):
            found.differences.append(replace(difference, at=at))


def _way(operators: list[Operator], forward: bool) -> list[Operator]:
    return [op for op in operators if (op.direction == "forward") is forward]


def _apart(
    step: Apart,
    traces: tuple[Trace, Trace],
    used: list[tuple[Value, Value]],
    differs: bool,
    floor: float,
) -> Difference:
    lone = [side for side in (step.benchmark, step.target) if _working(side)]
    if len(lone) == 1:
        who = "target" if step.target and lone[0] is step.target else "benchmark"
        other = "benchmark" if who == "target" else "target"
        said = say(
            "the {side} runs {operators}, which the {other} does not",
            side=of_side(who),
            operators=_listed(lone[0]),
            other=of_side(other),
        )
        if _are_given_from_elsewhere(traces[who == "target"], lone[0]):
            said += say("; it is given numbers that no traced operator made")
        cause = _meant(step, traces, used, floor, who == "target")
    elif not lone:
        # what they make of the same numbers shows where these are used
        cause, differs = IMPLEMENTATION, _overwrites(step, used, floor)
        if differs:
            said = say(
                "the {side} alone writes other numbers over what agreed until then: {operators}",
                side=of_side("target" if step.target else "benchmark"),
                operators=_listed(step.target or step.benchmark),
            )
        else:
            said = say(
                "views differ: {target} on the target, {benchmark} on the benchmark",
                target=_listed(step.target) or say("none"),
                benchmark=_listed(step.benchmark) or say("none"),
            )
    else:
        cause = _of_both(step, traces, used, floor)
        said = _where(step)
    views = all(wiring.is_view(op) for op in (*step.benchmark, *step.target))
    return Difference(cause, said, differs, _MOVES if views and len(lone) == 2 else "operators")


def _overwrites(step: Apart, used: list[tuple[Value, Value]], floor: float) -> bool:
    """Whether one side alone writes other numbers over what agreed until then."""
    if bool(step.benchmark) is bool(step.target):
        return False
    before = {
        op.inputs[0].value: op.inputs[0]
        for op in (*step.benchmark, *step.target)
        if meaning.plain(op) == "copy" and op.inputs
    }
    own = bool(step.target)
    handed = [(pair[own], pair[not own]) for pair in used]
    return any(
        both.differ(other, after, 0.0, floor)
        and not both.differ(other, before[after.value], 0.0, floor)
        for after, other in handed
        if after.value in before
    )


def _unlike(step: Apart) -> tuple[list[Operator], list[Operator]]:
    """What each side runs, views apart, without what the other runs as well by other code.

    Where one side computes, what the other lays out is nothing that it runs in that place.
    """
    sides = [[op for op in side if _working([op])] for side in (step.benchmark, step.target)]
    lays = [all(map(wiring.is_view, side)) for side in sides]
    if lays[0] != lays[1]:
        sides = [[] if only else side for side, only in zip(sides, lays, strict=True)]
    kinds = [Counter((op.name, str(scalars(op))) for op in side) for side in sides]
    rest: tuple[list[Operator], list[Operator]] = ([], [])
    for side, own in zip(sides, rest, strict=True):
        shared = kinds[0] & kinds[1]
        for op in side:
            kind = op.name, str(scalars(op))
            if not shared[kind]:
                own.append(op)
            shared[kind] -= shared[kind] > 0
    return rest


def _where(step: Apart) -> Said:
    """What the sides run in each other's place, in words."""
    benchmark, target = _unlike(step)
    if not (benchmark or target):
        return say(
            "the sides run the same operators by other code: {target} on the target, {benchmark} "
            "on the benchmark",
            target=_listed(step.target),
            benchmark=_listed(step.benchmark),
        )
    if benchmark and target:
        return say(
            "the target runs {target} where the benchmark runs {benchmark}",
            target=_listed(target),
            benchmark=_listed(benchmark),
        )
    who = "target" if target else "benchmark"
    return say(
        "the {side} runs {operators}, which the {other} does not",
        side=of_side(who),
        operators=_listed(target or benchmark),
        other=of_side("benchmark" if who == "target" else "target"),
    )


def _of_both(
    step: Apart, traces: tuple[Trace, Trace], used: list[tuple[Value, Value]], floor: float
) -> str:
    """What two stretches in each other's place are a cause of, where both do the same kind."""
    if vocabulary.narrowed(*traces):
        return "sampling_semantics"
    sides = (
        Stretch(traces[0], step.benchmark, used),
        Stretch(traces[1], step.target, [(t, b) for b, t in used]),
    )
    if all(map(effect.turns, sides)):
        return "position"
    if all(map(effect.unmasks, sides)):
        return "mask"
    changed = [(b, t) for b, t in used if both.differ(b, t, 0.0, floor)]
    moves = all(meaning.plain(op) in meaning.MOVES for side in sides for op in side.working)
    repeats = moves and wiring.are_repeated(changed, traces, floor)
    return "layout" if repeats else IMPLEMENTATION


def _meant(
    step: Apart,
    traces: tuple[Trace, Trace],
    used: list[tuple[Value, Value]],
    floor: float,
    on_target: bool,
) -> str:
    """What operators of one side alone are a cause of: by their names, or by their effect."""
    operators = step.target if on_target else step.benchmark
    handed = [(t, b) if on_target else (b, t) for b, t in used]
    stretch = Stretch(traces[on_target], operators, handed)
    if stepped.multiplies(stretch):
        return IMPLEMENTATION
    if effect.sums_gradients(stretch):
        return "accumulation"
    cause = meaning.of_operators(operators, stretch.around)
    if cause == "constant_factor" and _within_step(stretch):
        return IMPLEMENTATION
    if cause in ("constant_factor", "layout") and effect.of_angles(stretch):
        return "position"
    if effect.unmasks(stretch) or (cause == "layout" and effect.of_masks(stretch)):
        return "mask"
    if cause == "layout" and effect.routed(stretch):
        return "routing"
    if cause == "layout":
        changed = [(b, t) for b, t in used if both.differ(b, t, 0.0, floor)]
        moved = wiring.are_moved(used, floor) or wiring.are_repeated(changed, traces, floor)
        cause = effect.moved(stretch) if moved else IMPLEMENTATION
    if cause == "constant_factor" and vocabulary.tempered(stretch):
        return "sampling_semantics"
    if cause == "rounding_order" and not effect.is_one_rounding(stretch, floor):
        return IMPLEMENTATION
    return effect.of(stretch) or cause if cause == IMPLEMENTATION else cause


def _within_step(stretch: Stretch) -> bool:
    """Whether operators work on what an update's step has made: a part of its formula."""
    given = [v for op in stretch.working for v in op.inputs if math.prod(v.shape) > 1]
    forward = all(op.direction == "forward" for op in stretch.working)
    return stretch.trace.kind == "update" and forward and all(v.origin is None for v in given)


def _used(
    step: Apart, later: list[Both | Apart], traces: tuple[Trace, Trace]
) -> list[tuple[Value, Value]]:
    """What other operators made, where both sides use it next: by pairs of values.

    Other operators that make the same numbers are no cause. What a forward pass saves for the
    backward pass is no use of it. Where both go on with views of it alone, these are.
    """
    return _handed(step, later, traces, views=False) or _handed(step, later, traces, views=True)


def _handed(
    step: Apart, later: list[Both | Apart], traces: tuple[Trace, Trace], *, views: bool
) -> list[tuple[Value, Value]]:
    """Likewise, as it was made, or by views of it that one side alone takes as well."""
    ways = {op.direction for op in (*step.benchmark, *step.target)}
    made = [
        {value.value for op in side for value in op.outputs}
        for side in (step.benchmark, step.target)
    ]
    pairs: list[tuple[Value, Value]] = []
    for next_ in later:
        if isinstance(next_, Apart):
            if views:
                _hand_on(next_, made)
        elif next_.target.direction in ways:
            pairs += zip(next_.benchmark.inputs, next_.target.inputs, strict=False)
    pairs += zip(*(trace.outputs for trace in traces), strict=False)
    return [(one, other) for one, other in pairs if one.value in made[0] or other.value in made[1]]


def _hand_on(step: Apart, made: list[set[int]]) -> None:
    """Take the views of what was made among it."""
    for own, side in zip(made, (step.benchmark, step.target), strict=True):
        for op in side:
            if meaning.plain(op) in meaning.VIEWS and any(v.value in own for v in op.inputs):
                own.update(v.value for v in op.outputs)


def _working(operators: list[Operator]) -> bool:
    return any(meaning.plain(op) not in meaning.VIEWS for op in operators)


def _of_side(step: Both | Apart, side: int) -> list[Operator]:
    ran = (step.benchmark, step.target)[side]
    return [ran] if isinstance(ran, Operator) else ran


def _listed(operators: list[Operator]) -> Said:
    shown = [_with_numbers(op) for op in operators if meaning.plain(op) not in meaning.VIEWS]
    times = Counter(shown or [op.said for op in operators])
    return listed([f"{n} x {text}" if n > 1 else text for text, n in times.items()], _NAMED)


def _with_numbers(op: Operator) -> str:
    """An operator with those of its arguments that say something."""
    said = [
        f"{argument.name}={number(argument.scalar)}"
        for argument in op.arguments
        if not argument.tensors and not argument.default and argument.name not in both.LEFT_OUT
        and argument.scalar not in (None, [])
    ]  # fmt: skip
    said += [
        f"{argument.name}={number((argument.tensors[0].elements or [None])[0])}"
        for argument in op.arguments
        if len(argument.tensors) == 1 and len(argument.tensors[0].elements or ()) == 1
    ]
    # of a list how many: one that is left out is seen by nothing else
    said += [f"{a.name}=[{len(a.tensors)}]" for a in op.arguments if len(a.tensors) > 1]
    if not said:
        return op.said
    return f"{op.name}({', '.join(said)}){op.said.removeprefix(op.name)}"


def _numbers_taken(trace: Trace) -> set[float]:
    return {n for op in trace.operators for n in taken(op)}


def _last_collective(ran: Sequence[Operator], before: Operator | None) -> Operator | None:
    """The collective that an operator after these follows, with nothing but views between."""
    for op in reversed(ran):
        if meaning.is_collective(op):
            return op
        if meaning.plain(op) not in meaning.VIEWS:
            return None
    return before
