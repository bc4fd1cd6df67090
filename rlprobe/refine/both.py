"""An operator that both sides ran: what they were given, were told and made of it.

What a side was given is compared before what it made, so that the first difference is a cause and
not its consequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import conditioning, meaning, rounded, wiring
from rlprobe.refine.bounds import Bounds
from rlprobe.refine.difference import IMPLEMENTATION, Difference, apart, number, sized
from rlprobe.refine.entering import Changed, entering
from rlprobe.refine.pairing import Both, scalars
from rlprobe.refine.trace import ROUND_OFFS, Operator, Value, error, measurable
from rlprobe.said import NOTHING_SAID, Said, exactly, of_side, say

#: What an operator may make of its inputs' difference.
GROWTH = 8.0
#: Arguments that are no part of what is computed.
LEFT_OUT = ("pin_memory", "device", "layout", "memory_format", "non_blocking", "generator")


@dataclass(frozen=True)
class Beside:
    """What ran beside an operator."""

    #: The target's operators.
    operators: list[Operator]
    #: Numbers that code took off tensors, by side.
    taken: Sequence[set[float]]
    #: The collective that ran on the target just before, views apart.
    collective: Operator | None
    #: What differences may grow to, of the operators so far.
    bounds: Bounds
    #: Steps of which nothing tells whether they differ by themselves.
    untold: list[Both]
    #: Whether they surround the model.
    around: bool


def differences(step: Both, beside: Beside, noise: float, floor: float) -> list[Difference]:
    """What differs of the operator: formats, arguments, what it is given, or what it makes.

    Args:
        step: the operator on both sides.
        beside: what ran beside it.
        noise: relative difference that agreeing values have by the time they enter the trace.
        floor: relative difference that results may have.
    """
    b, t = step.benchmark, step.target
    given = _inputs_differ(b, t)
    changed = changes(b, t, 0.0, given, floor)
    if (b.repeats is False) != (t.repeats is False):
        return [_race(t, "target" if t.repeats is False else "benchmark")]
    found = _formats(b, t, changed)
    if meaning.plain(t) not in meaning.VIEWS:  # how numbers lie shows where they are used
        found += _scalars(b, t, changed, beside, noise)
    # what a batch holds is held against its noise: a loss, whose parts cancel, may differ by more
    moved = changed or changes(b, t, 0.0, given, GROWTH * noise)
    found += entering(b, t, Changed(changed, moved, beside.around), noise, beside.collective)
    return found or _kernel(step, beside, given, max(noise, floor))


def counted(step: Both, floor: float) -> Difference | None:
    """A list of other length that an operator is given; None where none is.

    Its entries are nobody's partners by their places.
    """
    b, t = step.benchmark, step.target
    for one, other in zip(b.arguments, t.arguments, strict=False):
        sizes = [len(argument.tensors) for argument in (one, other)]
        if one.name != other.name or sizes[0] == sizes[1] or min(sizes) < 1:
            continue
        said = say(
            "{operator} is given {target} tensors as {name} on the target and {benchmark} on the "
            "benchmark",
            operator=t.said,
            name=one.name,
            target=sizes[1],
            benchmark=sizes[0],
        )
        changed = len(b.outputs) != len(t.outputs) or changes(b, t, 0.0, 1.0, floor)
        return Difference(IMPLEMENTATION, said, changed, "format")
    return None


def _kernel(step: Both, beside: Beside, given: float, agreed: float) -> list[Difference]:
    """The operator itself, where it makes more of a difference than what it is given explains.

    Of numbers that are apart already nothing is blamed: what it takes of other ranks is not seen.
    """
    b, t = step.benchmark, step.target
    if scalars(b) != scalars(t):
        return []
    bounds = beside.bounds.of(b, t)
    if meaning.plain(t) in meaning.VIEWS:
        return []
    same = _is_own(b, t, given)
    if (bounds is None and not same) or _are_apart(b, t, agreed):
        if any(error(*pair) not in (0.0, None) for pair in zip(b.outputs, t.outputs, strict=False)):
            beside.untold.append(step)
        return []
    condition = conditioning.factor(b)
    if bounds is None:
        own = changes(b, t, given, given, 0.0, condition)
    else:
        own = exceeds(b, t, bounds, condition)
    if not own:
        return []
    if same:
        said = say(
            "{operator} is given the same on both sides and makes something else: its "
            "results differ by {size}",
            operator=t.said,
            size=_size(b, t),
        )
    else:
        said = say(
            "{operator} makes something else of about the same: its results differ by {size}, "
            "where what it is given may make a difference of {most:.2g}",
            operator=t.said,
            size=_size(b, t),
            most=max(_relative(size, v) for size, v in zip(bounds or [], b.outputs, strict=False)),
        )
    short = _rounds(b, t)
    if short is None:
        return [Difference(IMPLEMENTATION, said, True, "kernel", t.said)]
    side, name = short
    said += say(
        "; on the {side} alone, what it makes are {format} numbers",
        format=name,
        side=of_side(side),
    )
    return [Difference("rounding_order", said, True, "kernel", t.said)]


def _rounds(b: Operator, t: Operator) -> tuple[str, str] | None:
    """The side that rounds what it makes to a shorter format, and that format.

    All that differs is of the shorter format on that side alone, and differs by no more than a
    rounding to it: a kernel's results, of which every element was looked at.
    """
    pairs = [
        (one, other)
        for one, other in zip(b.outputs, t.outputs, strict=False)
        if error(one, other) != 0.0
    ]
    found = {rounded.by(one, other) for one, other in pairs}
    return found.pop() if len(found) == 1 else None


def _relative(size: float, value: Value) -> float:
    return size / value.norm if value.norm else size


#: Sketches are some percent uncertain, and so is a bound that was made of them.
_UNCERTAIN = 2.0


def exceeds(b: Operator, t: Operator, bounds: Sequence[float], condition: float) -> bool:
    """Whether results differ by more than round-off and the differences of the inputs explain.

    Args:
        b, t: the operator on both sides.
        bounds: by how much each result may differ, as L2 norm, but for round-off.
        condition: how much larger than its result the operator's round-off may be.
    """
    for one, other, most in zip(b.outputs, t.outputs, bounds, strict=False):
        size = error(one, other)
        if size is None or (most and not measurable(one, other)):
            continue
        unit = max(UNIT.get(one.dtype, 0.0), UNIT["torch.float32"])
        if size > ROUND_OFFS * unit * condition + _UNCERTAIN * _relative(most, one):
            return True
    return False


def _race(op: Operator, side: str) -> Difference:
    said = say(
        "{operator}, run twice on the same, makes something else on the {side}",
        operator=op.said,
        side=of_side(side),
    )
    return Difference("nondeterministic", said, True, "race")


def _are_apart(b: Operator, t: Operator, agreed: float) -> bool:
    """Whether an input is known to differ by more than numbers that agree, and all they grow to."""
    least = max(agreed, ROUND_OFFS * UNIT["torch.float32"])
    sizes = (error(one, other) for one, other in zip(b.inputs, t.inputs, strict=False))
    return any(size is not None and GROWTH * least < size < math.inf for size in sizes)


def _inputs_differ(b: Operator, t: Operator) -> float:
    """Largest difference of their inputs; infinite where it is not known, or there are none."""
    sizes = [error(one, other) for one, other in zip(b.inputs, t.inputs, strict=False)]
    return max((float("inf") if size is None else size for size in sizes), default=float("inf"))


def _is_own(b: Operator, t: Operator, given: float) -> bool:
    """Whether an operator was given the same, within round-off: else nothing bounds its results."""
    units = [UNIT.get(value.dtype, 0.0) for op in (b, t) for value in op.inputs]
    return given <= ROUND_OFFS * max([*units, UNIT["torch.float32"]])


def changes(
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
        if differ(one, other, explained, floor, condition):
            return True
    return False


def _size(b: Operator, t: Operator) -> Said:
    """The largest difference of their results."""
    pairs = zip(b.outputs, t.outputs, strict=False)
    sizes = [(error(one, other) or 0.0, math.prod(one.shape)) for one, other in pairs]
    return sized(*max(sizes, default=(0.0, 0)))


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
    b: Operator, t: Operator, changed: bool, beside: Beside, noise: float
) -> list[Difference]:
    one, other = dict(scalars(b)), dict(scalars(t))
    # what code took off a tensor has the tensor's noise; what is written down has none
    allowed = max(noise, ROUND_OFFS * UNIT["torch.float32"]) if noise else 0.0
    found = []
    for name in [*other, *(n for n in one if n not in other)]:
        if name in LEFT_OUT or not apart(one.get(name), other.get(name), allowed):
            continue
        cause = meaning.of_scalar(t, name, one.get(name), other.get(name))
        if not beside.around and meaning.unmasks(t, one.get(name), other.get(name)):
            cause = "mask"
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
        computed = [_is_among(n, own) for n, own in zip((one.get(name), other.get(name)),
                                                        beside.taken, strict=True)]  # fmt: skip
        if cause == "hyperparameter" and len(set(computed)) == 2:
            # a number that one side computes is no setting
            cause = IMPLEMENTATION
            said += say(
                ", and the {side}'s was taken off a tensor",
                side=of_side("target" if computed[1] else "benchmark"),
            )
        found.append(Difference(cause, said, changed, "scalar"))
    return found


def _is_among(told: object, taken: set[float]) -> bool:
    """Whether an argument is a number that code took off a tensor: a list, or a word, is none."""
    return isinstance(told, (int, float)) and told in taken


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


def differ(
    one: Value, other: Value, explained: float, floor: float, condition: float = 1.0
) -> bool:
    """Whether two values differ by more than round-off, a floor and their inputs explain."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return True
    size = error(one, other)
    unit = max(UNIT.get(one.dtype, 0.0), UNIT["torch.float32"])
    # a floor is what round-off makes; where none is known some last bits are
    allowed = floor or ROUND_OFFS * unit * condition
    return size is not None and size > allowed + GROWTH * condition * explained
