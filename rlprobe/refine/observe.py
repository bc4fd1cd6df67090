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
    conditioning,
    effect,
    idle,
    meaning,
    settings,
    stepped,
    vocabulary,
    wiring,
    written,
)
from rlprobe.refine.difference import CONSTANT, IMPLEMENTATION, Difference, apart, number
from rlprobe.refine.entering import entering
from rlprobe.refine.pairing import Apart, Both, pair, reordered, scalars
from rlprobe.refine.stretch import Stretch
from rlprobe.refine.trace import Operator, Trace, Value, error, measurable, taken
from rlprobe.said import NOTHING_SAID, Said, exactly, listed, of_side, say

#: Round-offs by which one operator's results may differ on two devices, inputs alike.
_KERNEL = 32.0
#: What an operator may make of its inputs' difference.
_GROWTH = 8.0
#: Differences listed.
_MOST = 8
#: Operators of one stretch that are named.
_NAMED = 6
_LEFT = ("pin_memory", "device", "layout", "memory_format", "non_blocking", "generator")


@dataclass
class Observed:
    """What the traces of the two sides show."""

    differences: list[Difference] = field(default_factory=list)
    operators: tuple[int, int] = (0, 0)

    @property
    def first(self) -> Difference | None:
        """The first difference that changes numbers."""
        return next((d for d in self.differences if d.effective), None)


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
    sides = _with_modules(benchmark), _with_modules(target)
    live = [{op.n for op in trace.live()} for trace in (benchmark, target)]
    found = Observed(operators=(len(live[0]), len(live[1])))
    if target.kind == "update":
        found.differences += settings.differences(benchmark, target)
        found.differences += settings.counts(benchmark, target)
        steps = pair(*sides)  # in the order they ran: gradients are added up before the step
    else:
        ways = (True,) if forward and target.kind == "module" else (True, False)
        steps = [step for way in ways for step in pair(*(_way(s, way) for s in sides))]
    steps = reordered(steps)
    unused = idle.unused(benchmark, target), idle.unused(target, benchmark)
    ran = idle.Idle(benchmark), idle.Idle(target)
    wires = wiring.Wires(steps, floor)
    outside = written.Written((benchmark, target))
    numbers = [_numbers_taken(trace) for trace in (benchmark, target)]
    collective: Operator | None = None
    for at, step in enumerate(steps):
        if isinstance(step, Apart):
            step = Apart(
                ran[1].without([op for op in step.benchmark if op.n in live[0] - unused[0]]),
                ran[0].without([op for op in step.target if op.n in live[1] - unused[1]]),
            )
            if not (step.benchmark or step.target):
                continue
            used = _used(step, steps[at + 1 :], (benchmark, target))
            # where nothing that both sides run uses what they made, they may be a cause
            differs = not used or any(_differ(one, other, 0.0, floor) for one, other in used)
            differs = differs or _writes_parameters(step, (benchmark, target))
            _add(found, [_apart(step, (benchmark, target), used, differs, floor)])
            collective = _last_collective(step.target, collective)
        else:
            other = wires.difference(step, _changed(step.benchmark, step.target, 0.0, 1.0, floor))
            other = other or outside.difference(step)
            own = _Beside(sides[1], numbers, collective)
            _add(found, [other] if other else _both(step, own, noise, floor))
            collective = _last_collective([step.target], collective)
    found.differences = settings.of_another_computation(found.differences)
    return _of_constants(found, benchmark, target, floor)


def _of_constants(found: Observed, benchmark: Trace, target: Trace, floor: float) -> Observed:
    """What differs where no operator does: the one parameter or buffer that does.

    A constant may differ by less than results may, and make more of it.
    """
    lone = [d for d in found.differences if d.kind == CONSTANT]
    pairs = zip(benchmark.outputs, target.outputs, strict=False)
    if found.first is None and len(lone) == 1 and any(_differ(b, t, 0.0, floor) for b, t in pairs):
        found.differences = [replace(d, effective=d is lone[0]) for d in found.differences]
    return found


def _are_given_from_elsewhere(trace: Trace, operators: list[Operator]) -> bool:
    """Whether operators are given computed numbers that their trace knows nothing of."""
    elsewhere = {
        v.value for op in trace.operators for v in op.inputs
        if v.origin == "elsewhere" and math.prod(v.shape) > 1 and v.dtype in UNIT
    }  # fmt: skip
    return trace.kind != "update" and any(v.value in elsewhere for op in operators
                                          for v in op.inputs)  # fmt: skip


def _writes_parameters(step: Apart, traces: tuple[Trace, Trace]) -> bool:
    """Whether one side alone changes parameters, by however little of them.

    A step changes weights by a small part of them, so that floors of values do not hold there.
    """
    lone = [side for side in (step.benchmark, step.target) if _working(side)]
    if traces[0].kind != "update" or len(lone) != 1:
        return False
    trace = traces[0] if lone[0] is step.benchmark else traces[1]
    return stepped.writes_parameters(trace, [op for op in lone[0] if _working([op])])


def _with_modules(trace: Trace) -> list[Operator]:
    """Operators that results depend on, and modules within, which ran whether they do or not."""
    live = trace.live()
    known = {op.n for op in live}
    dead = [op for op in trace.operators if op.name.startswith("module::") and op.n not in known]
    # forward first, as they are: what is inserted is forward
    forward = sorted([*dead, *(op for op in live if op.direction == "forward")], key=lambda o: o.n)
    return [*forward, *(op for op in live if op.direction != "forward")]


def _add(found: Observed, differences: list[Difference]) -> None:
    """Take what is not said yet; of what changes no number, half as much."""
    for difference in differences:
        listed = [d for d in found.differences if d.effective or not difference.effective]
        said = any(d.said == difference.said for d in found.differences)
        if not said and len(listed) < (_MOST if difference.effective else _MOST // 2):
            found.differences.append(difference)


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
        cause, differs = IMPLEMENTATION, False
        said = say(
            "views differ: {target} on the target, {benchmark} on the benchmark",
            target=_listed(step.target) or say("none"),
            benchmark=_listed(step.benchmark) or say("none"),
        )
    else:
        cause = _of_both(step, traces, used, floor)
        said = say(
            "the target runs {target} where the benchmark runs {benchmark}",
            target=_listed(step.target),
            benchmark=_listed(step.benchmark),
        )
    return Difference(cause, said, differs, "operators")


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
    changed = [(b, t) for b, t in used if _differ(b, t, 0.0, floor)]
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
    if cause in ("constant_factor", "layout") and effect.of_angles(stretch):
        return "position"
    if cause == "layout" and effect.routed(stretch):
        return "routing"
    if cause == "layout":
        changed = [(b, t) for b, t in used if _differ(b, t, 0.0, floor)]
        moved = wiring.are_moved(used, floor) or wiring.are_repeated(changed, traces, floor)
        cause = effect.moved(stretch) if moved else IMPLEMENTATION
    if cause == "constant_factor" and vocabulary.tempered(stretch):
        return "sampling_semantics"
    if cause == "rounding_order" and not effect.is_one_rounding(stretch, floor):
        return IMPLEMENTATION
    return effect.of(stretch) or cause if cause == IMPLEMENTATION else cause


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


def _differ(
    one: Value, other: Value, explained: float, floor: float, condition: float = 1.0
) -> bool:
    """Whether two values differ by more than round-off, a floor and their inputs explain."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return True
    size = error(one, other)
    unit = max(UNIT.get(one.dtype, 0.0), UNIT["torch.float32"])
    # a floor is what round-off makes; where none is known some last bits are
    allowed = floor or _KERNEL * unit * condition
    return size is not None and size > allowed + _GROWTH * condition * explained


def _working(operators: list[Operator]) -> bool:
    return any(meaning.plain(op) not in meaning.VIEWS for op in operators)


def _listed(operators: list[Operator]) -> Said:
    shown = [_with_numbers(op) for op in operators if meaning.plain(op) not in meaning.VIEWS]
    times = Counter(shown or [op.said for op in operators])
    return listed([f"{n} x {text}" if n > 1 else text for text, n in times.items()], _NAMED)


def _with_numbers(op: Operator) -> str:
    """An operator with those of its arguments that say something."""
    said = [
        f"{argument.name}={number(argument.scalar)}"
        for argument in op.arguments
        if not argument.tensors and not argument.default and argument.name not in _LEFT
        and argument.scalar not in (None, [])
    ]  # fmt: skip
    said += [
        f"{argument.name}={number((argument.tensors[0].elements or [None])[0])}"
        for argument in op.arguments
        if len(argument.tensors) == 1 and len(argument.tensors[0].elements or ()) == 1
    ]
    if not said:
        return op.said
    return f"{op.name}({', '.join(said)}){op.said.removeprefix(op.name)}"


@dataclass(frozen=True)
class _Beside:
    """What ran beside an operator."""

    #: The target's operators.
    operators: list[Operator]
    #: Numbers that code took off tensors, by side.
    taken: Sequence[set[float]]
    #: The collective that ran on the target just before, views apart.
    collective: Operator | None


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


def _both(step: Both, beside: _Beside, noise: float, floor: float) -> list[Difference]:
    b, t = step.benchmark, step.target
    given = _inputs_differ(b, t)
    changed = _changed(b, t, 0.0, given, floor)
    if (b.repeats is False) != (t.repeats is False):
        return [_race(t, "target" if t.repeats is False else "benchmark")]
    found = _formats(b, t, changed)
    if meaning.plain(t) not in meaning.VIEWS:  # how numbers lie shows where they are used
        found += _scalars(b, t, changed, beside, noise)
    found += entering(b, t, changed, noise, beside.collective)
    same = _is_own(b, t, given) and scalars(b) == scalars(t)
    own = same and meaning.plain(t) not in meaning.VIEWS
    if not found and own and _changed(b, t, given, given, 0.0, conditioning.factor(b)):
        found.append(
            Difference(
                IMPLEMENTATION,
                say(
                    "{operator} is given the same on both sides and makes something else: its "
                    "results differ by {size}",
                    operator=t.said,
                    size=_size(b, t),
                ),
                True,
                "kernel",
            )
        )
    return found


def _race(op: Operator, side: str) -> Difference:
    said = say(
        "{operator}, run twice on the same, makes something else on the {side}",
        operator=op.said,
        side=of_side(side),
    )
    return Difference("nondeterministic", said, True, "race")


def _inputs_differ(b: Operator, t: Operator) -> float:
    """Largest difference of their inputs; infinite where it is not known, or there are none."""
    sizes = [error(one, other) for one, other in zip(b.inputs, t.inputs, strict=False)]
    return max((float("inf") if size is None else size for size in sizes), default=float("inf"))


def _is_own(b: Operator, t: Operator, given: float) -> bool:
    """Whether an operator was given the same, within round-off: else nothing bounds its results."""
    units = [UNIT.get(value.dtype, 0.0) for op in (b, t) for value in op.inputs]
    return given <= _KERNEL * max([*units, UNIT["torch.float32"]])


def _changed(
    b: Operator, t: Operator, explained: float, given: float, floor: float, condition: float = 1.0
) -> bool:
    """Whether results differ by more than a difference of their inputs and round-off explain.

    Args:
        b, t: the operator on both sides.
        explained: difference of the inputs that is taken to explain one of the results.
        given: difference of the inputs. What nobody knows the size of (a mask's largest numbers
            have no sketch) is a difference of the operator's own only where they are equal.
        floor: by which results may differ that agree.
        condition: how much larger than its result the operator's round-off may be.
    """
    for one, other in zip(b.outputs, t.outputs, strict=False):
        size = error(one, other)
        if size == float("inf") and not measurable(one, other) and given > 0:
            continue
        if _differ(one, other, explained, floor, condition):
            return True
    return False


def _size(b: Operator, t: Operator) -> str:
    sizes = [error(one, other) for one, other in zip(b.outputs, t.outputs, strict=False)]
    return f"{max((size for size in sizes if size is not None), default=0.0):.2g}"


def _formats(b: Operator, t: Operator, changed: bool) -> list[Difference]:
    pairs = [*zip(b.inputs, t.inputs, strict=False), *zip(b.outputs, t.outputs, strict=False)]
    for one, other in pairs:
        if one.dtype != other.dtype:
            floats = "float" in one.dtype and "float" in other.dtype
            return [
                Difference(
                    "rounding_order" if floats else IMPLEMENTATION,
                    say(
                        "{operator} works on {target} on the target and on {benchmark} on the "
                        "benchmark",
                        operator=t.said,
                        target=_short(other.dtype),
                        benchmark=_short(one.dtype),
                    ),
                    True,
                    "format",
                )
            ]
    if meaning.plain(t) in meaning.VIEWS | meaning.MOVES:
        return []
    for one, other in pairs:
        if one.shape != other.shape:
            return [
                Difference(
                    IMPLEMENTATION,
                    say(
                        "{operator} works on shape {target} on the target and {benchmark} on the "
                        "benchmark",
                        operator=t.said,
                        target=other.shape,
                        benchmark=one.shape,
                    ),
                    changed,
                    "format",
                )
            ]
    return []


def _short(dtype: str) -> str:
    return dtype.removeprefix("torch.")


def _scalars(
    b: Operator, t: Operator, changed: bool, beside: _Beside, noise: float
) -> list[Difference]:
    one, other = dict(scalars(b)), dict(scalars(t))
    # what code took off a tensor has the tensor's noise; what is written down has none
    allowed = max(noise, _KERNEL * UNIT["torch.float32"]) if noise else 0.0
    found = []
    for name in [*other, *(n for n in one if n not in other)]:
        if name in _LEFT or not apart(one.get(name), other.get(name), allowed):
            continue
        cause = meaning.of_scalar(t, name)
        if cause == "layout" and not wiring.are_moved(
            [*zip(b.outputs, t.outputs, strict=False)], noise
        ):
            cause = IMPLEMENTATION  # other elements, and not the same ones elsewhere
        use = _use(t, beside.operators)
        said = say(
            "{name} {target} on the target instead of {benchmark} in {before}{operator}",
            name=_named(name, t, use),
            target=number(other.get(name)),
            benchmark=number(one.get(name)),
            before=_before(use),
            operator=t.said,
        )
        computed = [n in own for n, own in zip((one.get(name), other.get(name)), beside.taken,
                                               strict=True)]  # fmt: skip
        if cause == "hyperparameter" and len(set(computed)) == 2:
            # a number that one side computes is no setting
            cause = IMPLEMENTATION
            said += say(
                ", and the {side}'s was taken off a tensor",
                side=of_side("target" if computed[1] else "benchmark"),
            )
        found.append(Difference(cause, said, changed, "scalar"))
    return found


#: Operators before which a number that is added is an epsilon.
_GUARDED = ("rsqrt", "sqrt", "reciprocal", "div", "log")

_NUMBERS = {"add": say("the number added"), "mul": say("factor"), "div": say("divisor")}


def _named(name: str, op: Operator, use: str | None) -> Said:
    """An argument in the words of its use."""
    kind = meaning.plain(op)
    if name == "eps" or (name == "other" and kind == "add" and use in _GUARDED):
        return say("epsilon")
    if name != "other":
        return exactly(name)
    return _NUMBERS.get(kind, say("the number"))


def _before(use: str | None) -> Said:
    return say("{use}'s input, ", use=use) if use in _GUARDED else NOTHING_SAID


def _use(op: Operator, operators: list[Operator]) -> str | None:
    """The operator that is given what this one made."""
    made = {value.value for value in op.outputs}
    later = (o for o in operators if o.n > op.n and o.direction == op.direction)
    user = next((o for o in later if made & {v.value for v in o.inputs}), None)
    return None if user is None else meaning.plain(user)
