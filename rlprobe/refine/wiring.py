"""What operators of both sides are given, where no operator differs and all that follows does.

An operator may be given what another one made, or the same numbers laid out otherwise: each side
runs the same and makes the same of the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlprobe.diagnose.cause.hypotheses.experts import is_choice
from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import effect, meaning
from rlprobe.refine.difference import IMPLEMENTATION, VIEWS, WIRING, Difference, apart, number
from rlprobe.refine.pairing import Apart, Both
from rlprobe.refine.trace import ELSEWHERE, ROUND_OFFS, Operator, Trace, Value, error, measurable
from rlprobe.said import Said, exactly, listed, of_side, say

#: Standard deviations by which a norm may be off.
_DEVIATIONS = 3.0
#: Views of one value that are named.
_NAMED = 4


def are_moved(pairs: Sequence[tuple[Value, Value]], floor: float) -> bool:
    """Whether values hold the same numbers, wherever they stand: what moves may also leave out.

    Where there are none, nothing says so.

    Args:
        pairs: benchmark's and target's.
        floor: relative difference of numbers that agree.
    """
    least = ROUND_OFFS * UNIT["torch.float32"]
    return bool(pairs) and all(
        math.prod(one.shape) == math.prod(other.shape)
        and not apart(one.norm, other.norm, max(of_norms(floor, math.prod(one.shape)), least))
        and not any(
            apart(getattr(one, name), getattr(other, name), max(floor, least))
            for name in ("max", "min")
        )
        for one, other in pairs
    )


def are_repeated(
    pairs: Sequence[tuple[Value, Value]], traces: Sequence[Trace], floor: float
) -> bool:
    """Whether values repeat numbers that agree, and each side repeats others of them.

    Both lead back, by operators that move, leave out or repeat, to values that agree and have fewer
    numbers; the largest and the smallest of these stand in both.

    Args:
        pairs: benchmark's and target's, other values.
        traces: the benchmark's and the target's.
        floor: relative difference of numbers that agree.
    """
    least = max(floor, ROUND_OFFS * UNIT["torch.float32"])
    makers = [_makers(trace) for trace in traces]
    for one, other in pairs:
        chains = [_chain(v, own) for v, own in zip((one, other), makers, strict=True)]
        source = _shared(chains[0], chains[1], least)
        fewer = source is not None and math.prod(source.shape) < math.prod(one.shape)
        if one.shape != other.shape or not fewer:
            return False
        ends = ((one.max, other.max), (one.min, other.min))
        if any(apart(end, its, least) for end, its in ends):
            return False
    return bool(pairs)


def _makers(trace: Trace) -> dict[int, Operator]:
    """Who made each value; not what gives back what it was given."""
    return {
        v.value: op
        for op in trace.operators
        for v in op.outputs
        if v.value not in {given.value for given in op.inputs}
    }


def _chain(value: Value, makers: Mapping[int, Operator]) -> list[Value]:
    """A value, and all that its numbers were taken from by what moves, repeats or leaves out."""
    op = makers.get(value.value)
    if op is None or meaning.plain(op) not in meaning.VIEWS | meaning.MOVES:
        return [value]
    given = [v for v in op.inputs if not is_choice(v.dtype)]
    if not given or not _is_as_made(value, op):
        return [value]
    chains = [_chain(v, makers) for v in given]
    shared = set.intersection(*({v.value for v in chain} for chain in chains))
    return [value, *(v for v in chains[0] if v.value in shared)]


def _shared(one: Sequence[Value], other: Sequence[Value], least: float) -> Value | None:
    """The nearest value that agrees with one of the other side's chain."""
    for v in one:
        sizes = (error(v, w) for w in other)
        if any(size is not None and size <= least for size in sizes):
            return v
    return None


def of_norms(floor: float, count: int) -> float:
    """What the norms of two tensors may differ by whose elements differ by ``floor``, relative.

    Errors of either sign average out in a sum of squares: of ``count`` of them it keeps the share
    of a standard deviation, and their own square.
    """
    return min(floor, floor * (floor + _DEVIATIONS / math.sqrt(max(count, 1))))


@dataclass(frozen=True)
class _Source:
    """Where a value comes from: what it is a view of, by which views, and who made that."""

    value: Value
    views: list[_View]
    maker: Both | None

    @property
    def said(self) -> Said:
        """The views in words."""
        return listed([view.said for view in self.views] or [say("none")], _NAMED)


@dataclass(frozen=True)
class _View:
    """An operator that lays numbers out otherwise, and which of its results is taken."""

    operator: Operator
    place: int

    @property
    def said(self) -> str:
        op = self.operator
        numbers = [
            f"{a.name}={number(a.scalar)}"
            for a in op.arguments
            if not a.tensors and not a.default and a.name not in ("memory_format", "implicit")
        ]
        text = f"{op.name}({', '.join(numbers)})" if numbers else op.name
        return f"{text}[{self.place}]" if len(op.outputs) > 1 else text


#: Who made a value: an operator that both sides run, or the name by which it came in on both; None
#: where neither is known.
_End = Both | str | None


@dataclass(frozen=True)
class _Wire:
    """An argument of an operator: where it comes from on the benchmark, and where on the target."""

    benchmark: _End
    target: _End


class Wires:
    """Who made what operators of both sides are given.

    Args:
        steps: of both traces, in order.
        floor: relative difference of values that agree.
        around: they are of no module: what a loss or an update is given means something by itself,
            and numbers that trade places there are not the same ones elsewhere.
    """

    def __init__(
        self, steps: Sequence[Both | Apart], floor: float, *, around: bool = False
    ) -> None:
        self._floor = floor
        self._around = around
        self._allowed = max(floor, ROUND_OFFS * UNIT["torch.float32"])
        self._steps = steps
        self._views: tuple[dict[int, _View], dict[int, _View]] = ({}, {})
        self._made: tuple[dict[int, Both], dict[int, Both]] = ({}, {})
        self._lone: tuple[set[int], set[int]] = (set(), set())
        #: What came in, by name, and the names of values that did; of two values of one name none.
        self._named: tuple[dict[str, Value | None], dict[str, Value | None]] = ({}, {})
        self._names: tuple[dict[int, str], dict[int, str]] = ({}, {})
        #: What operators that compute are given.
        self._used: tuple[list[Value], list[Value]] = ([], [])
        for step in steps:
            self._take(step)
        self._crossed = {
            (_key(wire.benchmark), _key(wire.target))
            for step in steps
            if isinstance(step, Both)
            for wire in self._wires(step)
        }

    def _take(self, step: Both | Apart) -> None:
        for side, given in enumerate((step.benchmark, step.target)):
            for op in [given] if isinstance(given, Operator) else given:
                # what gives back what it was given made nothing
                made = {v.value for v in op.outputs} - {v.value for v in op.inputs}
                self._enter(op, side)
                if is_view(op):
                    places = enumerate(op.outputs)
                    found = {v.value: _View(op, i) for i, v in places if v.value in made}
                    self._views[side].update(found)
                    continue
                self._used[side].extend(op.inputs)
                if isinstance(step, Both):
                    self._made[side].update(dict.fromkeys(made, step))
                else:
                    self._lone[side].update(made)

    def _enter(self, op: Operator, side: int) -> None:
        named, names = self._named[side], self._names[side]
        for v in op.inputs:
            if v.origin is None or v.origin == ELSEWHERE or v.value in names:
                continue
            names[v.value] = v.origin
            named[v.origin] = None if v.origin in named else v

    def difference(self, step: Both, changed: bool) -> Difference | None:
        """What an operator is given in another's place; None where nothing is.

        Args:
            step: the operator on both sides.
            changed: whether its results differ.
        """
        if is_view(step.target):
            return None
        laid = self._laid_out(step, changed)
        if laid is not None:
            return laid
        for wire in self._wires(step):
            # where what the one made goes to the other's place, and back, they have traded places
            known = wire.benchmark is not None and wire.target is not None
            traded = known and (_key(wire.target), _key(wire.benchmark)) in self._crossed
            said = _given(step, wire)
            if traded:
                said += say("; the two have traded places")
            return Difference(self._of_traded(step, traded), said, changed, WIRING)
        return None

    def _laid_out(self, step: Both, changed: bool) -> Difference | None:
        """The same numbers that views alone have brought to other places."""
        pairs = []
        for one, other in self._differing(step):
            b, t = self._source(one, 0), self._source(other, 1)
            size = error(b.value, t.value)
            # by the same views it is a part that differs, which the whole hides
            if b.said != t.said and size is not None and size <= self._allowed:
                pairs.append((one, other, b, t))
        if not pairs:
            return None
        moved = are_moved([(one, other) for one, other, *_ in pairs], self._floor)
        one, other, b, t = pairs[0]
        said = say(
            "{operator} is given numbers that agree before {target} on the target and {benchmark} "
            "on the benchmark",
            operator=step.target.said,
            target=t.said,
            benchmark=b.said,
        )
        if moved:
            return Difference("layout", said, changed, VIEWS)
        traded = self._is_used(other, 0) and self._is_used(one, 1)
        if traded:
            said += say("; either side uses the other's part in another place")
        cause = "position" if traded and self._turns(step) else self._of_traded(step, traded)
        return Difference(cause, said, changed, VIEWS)

    def _of_traded(self, step: Both, traded: bool) -> str:
        """The class of an operator that is given other numbers, which may have traded places.

        The terms of a difference, or of a quotient, that trade places are the negative, or another
        number: no numbers in other places.
        """
        moves = traded and not self._around and meaning.plain(step.target) not in _ORDERED
        return "layout" if moves else IMPLEMENTATION

    def _turns(self, step: Both) -> bool:
        """Whether an operator, or what goes on with its result as it is, multiplies by angles."""
        follows = {v.value for v in step.target.inputs}
        for op in (s.target for s in self._steps if isinstance(s, Both)):
            if op.n < step.target.n or not follows & {v.value for v in op.inputs}:
                continue
            kind = meaning.plain(op)
            if kind in ("mul", "addcmul") and any(map(self._is_of_angles, op.inputs)):
                return not self._around
            if op is step.target or kind in meaning.VIEWS | meaning.MOVES | {"neg"}:
                follows |= {v.value for v in op.outputs}
        return False

    def _is_of_angles(self, value: Value) -> bool:
        """Whether a value that came in, or was made by a cosine or a sine, is a table of angles."""
        maker = self._source(value, 1).maker
        if maker is not None and meaning.plain(maker.target) not in _OF_ANGLES:
            return False
        return any(effect.are_of_angles(value, other) for other in self._used[1])

    def _is_used(self, value: Value, side: int) -> bool:
        """Whether an operator of a side is given what another side's value holds."""
        sizes = (error(value, own) for own in self._used[side])
        return any(size is not None and size <= self._allowed for size in sizes)

    def _wires(self, step: Both) -> list[_Wire]:
        found = []
        for one, other in self._differing(step):
            sources = [self._source(v, side) for side, v in enumerate((one, other))]
            b, t = (self._end(source, side) for side, source in enumerate(sources))
            if _key(b) == _key(t) or id(step) in (_key(b), _key(t)):
                continue
            # what operators of one side alone made is a difference of theirs
            if any(
                s.maker is None and s.value.value in own
                for s, own in zip(sources, self._lone, strict=True)
            ):
                continue
            if (b is None or t is None) and not (measurable(one, other) and _computes(b or t)):
                continue
            # each of the two makes on either side what it makes on the other
            if all(not isinstance(end, Both) or self._agrees(end) for end in (b, t)):
                found.append(_Wire(b, t))
        return found

    def _end(self, source: _Source, side: int) -> _End:
        """Who made a value, or its name where by that name the same came in on both sides."""
        name = self._names[side].get(source.value.value)
        if source.maker is not None or name is None:
            return source.maker
        both = [named.get(name) for named in self._named]
        if both[0] is None or both[1] is None:
            return None
        size = error(both[0], both[1])
        return name if size is not None and size <= self._allowed else None

    def _differing(self, step: Both) -> list[tuple[Value, Value]]:
        pairs = zip(step.benchmark.inputs, step.target.inputs, strict=False)
        # of another shape is not measurable, and differs
        return [
            (one, other)
            for one, other in pairs
            if (size := error(one, other)) is None or size > self._allowed
        ]

    def _source(self, value: Value, side: int) -> _Source:
        views: list[_View] = []
        while (view := self._views[side].get(value.value)) is not None and view not in views:
            if not _is_as_made(value, view.operator):
                break
            views.append(view)
            value = view.operator.inputs[0]
        maker = self._made[side].get(value.value)
        ran = None if maker is None else (maker.benchmark, maker.target)[side]
        if ran is None or not _is_as_made(value, ran):
            maker = None
        return _Source(value, views[::-1], maker)

    def _agrees(self, step: Both) -> bool:
        sizes = [
            error(b, t) for b, t in zip(step.benchmark.outputs, step.target.outputs, strict=False)
        ]
        return bool(sizes) and all(size is not None and size <= self._allowed for size in sizes)


def _key(end: _End) -> int | str | None:
    return id(end) if isinstance(end, Both) else end


def _computes(end: _End) -> bool:
    """Whether an operator computes numbers, and is no constant and no memory to write to."""
    return isinstance(end, Both) and meaning.plain(end.target) not in meaning.VIEWS | meaning.MAKES


#: What makes a table of angles, and brings it to a format or a scale.
_OF_ANGLES = frozenset({"cos", "sin", "mul"}) | meaning.CASTS
#: Operators that make something else of their two arguments in another order, element by element.
_ORDERED = frozenset({"sub", "rsub", "div", "true_divide", "pow", "atan2", "remainder", "fmod"})


def _from(end: Both | str, side: int) -> Said:
    if isinstance(end, str):
        return exactly(end)
    return say("what {maker} made", maker=(end.benchmark, end.target)[side].said)


def _given(step: Both, wire: _Wire) -> Said:
    """What an operator is given on either side, in words."""
    if wire.benchmark is not None and wire.target is not None:
        return say(
            "{operator} is given {target} on the target, and {benchmark} on the benchmark",
            operator=step.target.said,
            target=_from(wire.target, 1),
            benchmark=_from(wire.benchmark, 0),
        )
    side, other, maker = "target", "benchmark", wire.target
    if maker is None:
        side, other, maker = "benchmark", "target", wire.benchmark
    assert isinstance(maker, Both)
    return say(
        "{operator} is given what {maker} made on the {side}, and other numbers on the {other}, "
        "although it makes the same there",
        operator=step.target.said,
        maker=(maker.target if side == "target" else maker.benchmark).said,
        side=of_side(side),
        other=of_side(other),
    )


def _is_as_made(value: Value, op: Operator) -> bool:
    """Whether a value is what an operator made: nothing has written to it since."""
    made = next((v for v in op.outputs if v.value == value.value), None)
    return made is not None and made.digest == value.digest


def is_view(op: Operator) -> bool:
    """Whether an operator lays one value's numbers out otherwise, and makes none."""
    return meaning.plain(op) in meaning.VIEWS | meaning.MOVES and len(op.inputs) == 1
