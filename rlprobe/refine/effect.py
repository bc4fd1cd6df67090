"""What a stretch of operators that one side alone ran does to what it hands on.

A stretch whose operators mean nothing by their names may be known by its effect on the values that
both sides go on with: masks made into other masks, numbers that went through a shorter format, a
part of them multiplied or cut, heads turned. Each law here is checked on the recorded values, and
where none holds the operators are said and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlprobe.diagnose.cause.hypotheses.experts import is_choice, may_route
from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import meaning
from rlprobe.refine.trace import Operator, Trace, Value, error

#: A value as it was handed on, and what the other side has in its place.
Handed = tuple[Value, Value]


@dataclass(frozen=True)
class Stretch:
    """Operators of one side without a partner, and what became of their results.

    Args:
        trace: of the side that ran them.
        operators: in order, views included.
        handed: what operators of both sides go on with.
    """

    trace: Trace
    operators: Sequence[Operator]
    handed: Sequence[Handed]

    @cached_property
    def working(self) -> list[Operator]:
        """Those that are no view, no copy and no constant."""
        quiet = meaning.VIEWS | meaning.MAKES
        return [op for op in self.operators if meaning.plain(op) not in quiet]

    @cached_property
    def changed(self) -> list[Handed]:
        """What is handed on and is another value than the other side's."""
        return [(v, w) for v, w in self.handed if v.digest is None or v.digest != w.digest]

    @property
    def around(self) -> bool:
        """Whether they surround the model."""
        return self.trace.kind == "outputs"


def of(stretch: Stretch) -> str | None:
    """The class that the effect stands for; None where no law of these holds."""
    if not stretch.working or not stretch.changed:
        return None
    return next((cause for cause, law in _LAWS if law(stretch)), None)


def moved(stretch: Stretch) -> str:
    """The class of numbers that are moved: around the model these are tokens, or whole samples.

    Where the values are one number a token, the dimension along which they move says which; of rows
    that stand one behind the other, whether it is by as many places as a row has.
    """
    if not stretch.around:
        return "layout"
    shape = _tokens(stretch.trace)
    ops = [op for op in stretch.working if meaning.plain(op) in meaning.MOVES]
    if shape is None or any(
        math.prod(v.shape) > math.prod(shape) for op in ops for v in op.outputs
    ):
        return "layout"
    whole = {_moves_rows(op, shape[-1]) for op in ops}
    if whole == {True}:
        return "row_order"
    shifts = all(meaning.plain(op) in _SHIFTS for op in ops)
    return "label_or_mask_shift" if shifts and True not in whole else "layout"


def _moves_rows(op: Operator, length: int) -> bool:
    """Whether an operator moves rows of tokens as they are."""
    if len(op.outputs[0].shape) > 1:
        return _argument(op, "dim", "dims") == 0
    places = _argument(op, "shifts")
    return places is not None and places % length == 0


#: Moves that keep the order of what they move.
_SHIFTS = frozenset({"roll", "slice", "narrow", "cat", "select"})


def _argument(op: Operator, *names: str) -> int | None:
    """A whole number among an operator's arguments; None where it is not said, or several are."""
    for argument in op.arguments:
        if argument.name in names:
            found = argument.scalar
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
            return found if isinstance(found, int) else None
    return None


def _tokens(trace: Trace) -> list[int] | None:
    """Rows and tokens of the model's output."""
    shapes = [
        v.shape for op in trace.operators for v in op.inputs
        if v.origin is not None and v.origin.startswith("model output") and len(v.shape) > 1
    ]  # fmt: skip
    return shapes[0][:-1] if shapes else None


# masks


def _masks(stretch: Stretch) -> bool:
    """Other pairs are masked: what is handed on are masks, or scores that masks were put to."""
    rest = [op for op in stretch.working if not _makes_mask(op)]
    if not rest:
        return all(meaning.is_mask(v) for pair in stretch.changed for v in pair)
    return len(rest) < len(stretch.working) and all(map(_puts_mask, rest))


#: Operators that leave an additive mask one, where they are given nothing but masks.
_OF_MASKS = frozenset({"add", "minimum", "maximum", "triu", "tril", "index", "copy", "fill"})


def _makes_mask(op: Operator) -> bool:
    if all(is_choice(v.dtype) for v in op.outputs):
        return True  # lengths, places and comparisons of them
    if not all(_is_mask(v) for v in op.outputs):
        return False
    kind = meaning.plain(op)
    if kind in ("masked_fill", "where"):
        return all(_hides(n) or n == 0 for n in _numbers(op))
    moves = kind in meaning.MOVES or kind in _OF_MASKS
    return moves and all(_is_mask(v) for v in op.inputs if math.prod(v.shape) > 1)


def _is_mask(value: Value) -> bool:
    """Whether a value is a mask, or one that hides nothing."""
    return meaning.is_mask(value) or (value.max == 0.0 and value.min == 0.0)


def _puts_mask(op: Operator) -> bool:
    kind = meaning.plain(op)
    if kind == "add":
        return any(map(meaning.is_mask, op.inputs))
    return kind == "masked_fill" and all(map(_hides, _numbers(op)))


def _hides(number: float) -> bool:
    return number <= meaning.MASKED


def _numbers(op: Operator) -> list[float]:
    """Numbers among an operator's arguments, as scalars or as tensors of one element."""
    found = [a.scalar for a in op.arguments if not a.tensors and not a.default]
    found += [v.elements[0] for v in op.inputs if v.shape == [] and v.elements]
    return [float(n) for n in found if _is_number(n)]


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value in ("inf", "-inf")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# formats

#: Beside casts: how numbers are brought into a short format's range and back.
_SCALES = frozenset({
    "mul", "div", "abs", "max", "min", "amax", "amin", "aminmax", "clamp", "neg", "clamp_min",
    "clamp_max", "reciprocal", "round", "floor", "true_divide",
})  # fmt: skip
#: Unit round-off of what is rounded to whole numbers: seven bits are usual, four occur.
_WHOLE_UNIT = 2.0**-3


def _quantised(stretch: Stretch) -> bool:
    """Numbers go through a shorter format, scaled to its range and back."""
    casts = [op for op in stretch.working if meaning.plain(op) in meaning.CASTS]
    rest = {meaning.plain(op) for op in stretch.working} - meaning.CASTS
    units = [_unit(v) for op in casts for v in op.outputs]
    if "round" in rest:
        units.append(_WHOLE_UNIT)
    # to shape a maximum per row, or to leave a scale of 0 out, moves nothing
    return (
        bool(rest)
        and rest <= _SCALES
        and all(
            v.dtype == w.dtype and _within(error(w, v), max(units, default=0.0))
            and max(units, default=0.0) > max(_unit(w), UNIT["torch.bfloat16"] / 2)
            for v, w in stretch.changed
        )
    )  # fmt: skip


def _unit(value: Value) -> float:
    if value.dtype in ("torch.int8", "torch.uint8"):
        return _WHOLE_UNIT
    return UNIT.get(value.dtype, 0.0)


def _within(size: float | None, allowed: float) -> bool:
    return size is not None and 0.0 < size <= allowed


# a part in place


def _of_part(kinds: frozenset[str]) -> Callable[[Stretch], bool]:
    """A law of operators of ``kinds`` that work in place on a view of what is handed on."""

    def holds(stretch: Stretch) -> bool:
        rest = [op for op in stretch.working if not _is_view(op)]
        storages = {v.storage for v, _ in stretch.changed}
        return bool(rest) and all(
            meaning.plain(op) in kinds
            and meaning.is_by_number(op)
            and all(v.storage in storages for v in op.outputs)
            for op in rest
        )

    return holds


def _is_view(op: Operator) -> bool:
    """Whether an operator took a view, whose memory is that of what it was given."""
    given = {v.storage for v in op.inputs}
    return meaning.plain(op) in meaning.MOVES and all(v.storage in given for v in op.outputs)


def _cut(stretch: Stretch) -> bool:
    """The larger or the smaller of each element and one number."""
    rest = [op for op in stretch.working if any(math.prod(v.shape) > 1 for v in op.outputs)]
    kinds = {meaning.plain(op) for op in rest}
    cuts = kinds <= meaning.CUTS | {"minimum", "maximum"}
    return bool(rest) and cuts and all(_has_bound(op) for op in rest)


def _has_bound(op: Operator) -> bool:
    sizes = [math.prod(v.shape) for v in op.inputs]
    return len(sizes) == 1 or sizes.count(1) == 1


# positions

_TURNS = frozenset({
    "cos", "sin", "polar", "mul", "add", "sub", "neg", "complex", "addcmul", "view_as_complex",
    "view_as_real", "outer", "bmm", "mm", "matmul", "pow",
}) | meaning.MOVES | meaning.CASTS  # fmt: skip
#: Relative difference of the norms before and after a rotation.
_ISOMETRY = 1e-3


def _turned(stretch: Stretch) -> bool:
    """Vectors are rotated: their norms stay, and cosines and sines are what they are multiplied by.

    A table of cosines and one of sines of the same angles have squares that sum to one.
    """
    names = {meaning.plain(op) for op in stretch.working}
    if not names <= _TURNS or not names & {"mul", "addcmul"}:
        return False
    made = {v.value for op in stretch.operators for v in op.outputs}
    given = [v for op in stretch.operators for v in op.inputs if v.value not in made]
    whole = all(
        any(
            g.shape == v.shape and g.norm and v.norm
            and abs(v.norm - g.norm) <= _ISOMETRY * g.norm and error(g, v) not in (0.0, None)
            for g in given
        )
        for v, _ in stretch.changed
    )  # fmt: skip
    used = [v for op in stretch.working if meaning.plain(op) in ("mul", "addcmul")
            for v in op.inputs]  # fmt: skip
    # a table of complex numbers has no extremes: polar makes it of radii and angles
    return whole and ("polar" in names or _has_angles(used))


def of_angles(stretch: Stretch) -> bool:
    """Whether all that is handed on are tables of cosines or sines, on both sides: other angles.

    Turned around or moved, they are those of other positions.
    """
    tables = [v for op in stretch.trace.operators for v in op.inputs if _is_table(v)]
    return bool(stretch.changed) and all(
        _is_table(one) and any(_are_of_angles(one, other) for other in tables)
        for pair in stretch.changed
        for one in pair
    )


def _has_angles(values: Sequence[Value]) -> bool:
    tables = [v for v in values if _is_table(v)]
    return any(_are_of_angles(one, other) for one in tables for other in tables)


def _are_of_angles(one: Value, other: Value) -> bool:
    """Whether two tables may be of cosines and of sines of the same angles.

    They may be of two traces, whose numbers of values mean nothing to each other.
    """
    return (
        one.shape == other.shape
        and (one.digest is None or one.digest != other.digest)
        and (one.norm, one.max, one.min) != (other.norm, other.max, other.min)
        and math.isclose(
            (one.norm or 0.0) ** 2 + (other.norm or 0.0) ** 2,
            math.prod(one.shape), rel_tol=_ISOMETRY,
        )
    )  # fmt: skip


def _is_table(value: Value) -> bool:
    ends = [e for e in (value.max, value.min) if e is not None]
    return bool(ends) and math.prod(value.shape) > 1 and all(abs(float(e)) <= 1.001 for e in ends)


# what surrounds the model, and experts

_ORDERS = frozenset({"sort", "topk", "kthvalue", "argsort"})


def _truncated(stretch: Stretch) -> bool:
    """A vocabulary's scores are put in order: what draws from the first of them does that."""
    sizes = _vocabularies(stretch)
    return any(
        meaning.plain(op) in _ORDERS
        and any(v.shape and v.shape[-1] in sizes for v in op.inputs)
        and _argument(op, "dim") in (-1, len(op.inputs[0].shape) - 1)
        for op in stretch.working
    )


def tempered(stretch: Stretch) -> bool:
    """All scores of a token are multiplied by one number before anything is made of them."""
    sizes = _vocabularies(stretch)
    of_scores = [op for op in stretch.working if _last(op.outputs[0]) in sizes]
    return bool(of_scores) and all(
        meaning.plain(op) in meaning.TIMES
        and sum(_last(v) in sizes for v in op.inputs) == 1
        and all(_last(v) in {*sizes, 1} for v in op.inputs)
        for op in of_scores
    ) and all(_last(v) in sizes for v, _ in stretch.changed)  # fmt: skip


def _vocabularies(stretch: Stretch) -> set[int]:
    """How many scores the model gives a token, where it is what surrounds the model."""
    outputs = (
        v
        for op in stretch.trace.operators
        for v in op.inputs
        if v.origin is not None and v.origin.startswith("model output")
    )
    return {size for v in outputs if (size := _last(v)) > 1} if stretch.around else set()


def _last(value: Value) -> int:
    return value.shape[-1] if value.shape else 1


def _routed(stretch: Stretch) -> bool:
    """What is handed on are experts' weights or the choice of them: of a router's choice's shape.

    A choice are whole numbers that the suspect is given or hands out, beside weights of their
    shape.
    """
    module = stretch.trace.module or ""
    if not may_route(module.rpartition(".")[2]):
        return False
    ends = [v for op in stretch.trace.operators for v in op.inputs if _is_input(v)]
    shapes = _choices([*ends, *stretch.trace.outputs])
    return bool(shapes) and all(v.shape in shapes for v, _ in stretch.changed)


def _choices(values: Iterable[Value]) -> list[list[int]]:
    known = list(values)
    weights = [v.shape for v in known if not is_choice(v.dtype)]
    return [v.shape for v in known if is_choice(v.dtype) and v.shape in weights]


def _is_input(value: Value) -> bool:
    return value.origin is not None and value.origin.startswith("input ")


_LAWS: tuple[tuple[str, Callable[[Stretch], bool]], ...] = (
    ("mask", _masks),
    ("rounding_order", _quantised),
    ("routing", _routed),
    ("saturation", _of_part(meaning.CUTS)),
    ("saturation", _cut),
    ("constant_factor", _of_part(meaning.TIMES)),
    ("position", _turned),
    ("sampling_semantics", _truncated),
    ("sampling_semantics", tempered),
)
