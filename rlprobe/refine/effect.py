"""What a stretch of operators that one side alone ran does to what it hands on.

A stretch whose operators mean nothing by their names may be known by its effect on the values that
both sides go on with: masks made into other masks, numbers that went through a shorter format, a
part of them multiplied or cut, heads turned. Each law here is checked on the recorded values, and
where none holds the operators are said and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rlprobe.diagnose.cause.hypotheses.experts import is_choice, may_route
from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import meaning, vocabulary
from rlprobe.refine.stretch import Stretch, argument, hides, numbers
from rlprobe.refine.trace import Operator, Trace, Value, error


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
        return argument(op, "dim", "dims") == 0 or _picks_rows(op)
    places = argument(op, "shifts")
    return places is not None and places % length == 0


def _picks_rows(op: Operator) -> bool:
    """Whether one list of places, of the first dimension, is all that is picked by."""
    picked = [a.tensors for a in op.arguments if a.name == "indices"]
    return (
        meaning.plain(op) == "index"
        and [len(places) for places in picked] == [1]
        and all(is_choice(v.dtype) and len(v.shape) == 1 for v in picked[0])
        and op.inputs[0].shape[1:] == op.outputs[0].shape[1:]
    )


#: Moves that keep the order of what they move.
_SHIFTS = frozenset({"roll", "slice", "narrow", "cat", "select"})


def _tokens(trace: Trace) -> list[int] | None:
    """Rows and tokens of the model's output."""
    shapes = [
        v.shape for op in trace.operators for v in op.inputs
        if v.origin is not None and v.origin.startswith("model output") and len(v.shape) > 1
    ]  # fmt: skip
    return shapes[0][:-1] if shapes else None


# masks


def of_masks(stretch: Stretch) -> bool:
    """Whether nothing but masks is handed on, whatever was done to them: moved ones, too."""
    return bool(stretch.working and stretch.changed) and _masks(stretch)


def _masks(stretch: Stretch) -> bool:
    """Other pairs are masked: what is handed on are masks, or scores that masks were put to."""
    rest = [op for op in stretch.working if not _makes_mask(op)]
    if not rest:
        return all(meaning.is_mask(v) for pair in stretch.changed for v in pair)
    return len(rest) < len(stretch.working) and all(map(_puts_mask, rest))


#: Operators that leave an additive mask one, where they are given nothing but masks.
_OF_MASKS = frozenset({"add", "minimum", "maximum", "triu", "tril", "index", "copy", "fill"})


def unmasks(stretch: Stretch) -> bool:
    """Whether masks, and nothing but masks, are made into others that hide nothing, in a module.

    What is hidden on the other side has a weight there, by however little a number it is.
    """
    made = {v.value for op in stretch.operators for v in op.outputs}
    given = [v for op in stretch.operators for v in op.inputs
             if v.value not in made and math.prod(v.shape) > 1]  # fmt: skip
    return (
        not stretch.around
        and bool(stretch.working and stretch.changed)
        and all(is_choice(v.dtype) or meaning.is_mask(v) for v in given)
        and all(_hides(v) is not _hides(w) and None not in (v.min, w.min)
                for v, w in stretch.changed)
    )  # fmt: skip


def _hides(value: Value) -> bool:
    """Whether a value is a mask by numbers that are added to scores, of which one hides."""
    return not is_choice(value.dtype) and meaning.is_mask(value)


def _makes_mask(op: Operator) -> bool:
    if all(is_choice(v.dtype) for v in op.outputs):
        return True  # lengths, places and comparisons of them
    if not all(_is_mask(v) for v in op.outputs):
        return False
    kind = meaning.plain(op)
    if kind in ("masked_fill", "where"):
        return all(hides(n) or n == 0 for n in numbers(op))
    moves = kind in meaning.MOVES or kind in _OF_MASKS
    return moves and all(_is_mask(v) for v in op.inputs if math.prod(v.shape) > 1)


def _is_mask(value: Value) -> bool:
    """Whether a value is a mask, or one that hides nothing."""
    return meaning.is_mask(value) or (value.max == 0.0 and value.min == 0.0)


def _puts_mask(op: Operator) -> bool:
    kind = meaning.plain(op)
    if kind == "add":
        return any(map(meaning.is_mask, op.inputs))
    return kind == "masked_fill" and all(map(hides, numbers(op)))


# gradients


def sums_gradients(stretch: Stretch) -> bool:
    """In the backward passes of an update, tensors are added to tensors: gradients are summed up.

    A parameter that is added to its gradient is a decay, and a number is no gradient.
    """
    return (
        stretch.trace.kind == "update"
        and bool(stretch.working)
        and all(
            op.direction == "backward"
            and meaning.plain(op) == "add"
            and len({tuple(v.shape) for v in op.inputs}) == 1
            and len(op.inputs) > 1
            and not any((v.origin or "").startswith("parameter ") for v in op.inputs)
            for op in stretch.working
        )
    )


# formats

#: Beside casts: how numbers are brought into a short format's range and back.
_SCALES = frozenset({
    "mul", "div", "abs", "max", "min", "amax", "amin", "aminmax", "clamp", "neg", "clamp_min",
    "clamp_max", "reciprocal", "round", "floor", "true_divide",
})  # fmt: skip
#: How numbers are rounded by their bits, as whole numbers of the same memory.
_BITS = frozenset({
    "bitwise_and", "__and__", "bitwise_or", "__or__", "bitwise_left_shift", "__lshift__",
    "bitwise_right_shift", "__rshift__", "add", "sub", "bitwise_not",
})  # fmt: skip
#: Bits of a float's fraction, by the whole numbers that stand for them.
_FRACTION = {"torch.int32": 23, "torch.int16": 7}
#: Unit round-off of what is rounded to whole numbers: seven bits are usual, four occur.
_WHOLE_UNIT = 2.0**-3


def _quantised(stretch: Stretch) -> bool:
    """Numbers go through a shorter format, scaled to its range and back."""
    bits = [op for op in stretch.working if _is_of_bits(op)]
    casts = [op for op in stretch.working if meaning.plain(op) in meaning.CASTS]
    rest = {meaning.plain(op) for op in stretch.working if op not in bits} - meaning.CASTS
    units = [_unit(v) for op in casts for v in op.outputs] + [_cleared(op) for op in bits]
    if "round" in rest:
        units.append(_WHOLE_UNIT)
    # to shape a maximum per row, or to leave a scale of 0 out, moves nothing
    return (
        bool(rest or bits)
        and rest <= _SCALES
        and all(
            v.dtype == w.dtype and _within(error(w, v), max(units, default=0.0))
            and max(units, default=0.0) > max(_unit(w), 0.0 if bits else UNIT["torch.bfloat16"] / 2)
            for v, w in stretch.changed
        )
    )  # fmt: skip


#: Round-offs of a format that a cast to it may make of all elements together.
_CAST = 4.0


def is_one_rounding(stretch: Stretch, floor: float) -> bool:
    """Whether casts may have made all that what is handed on differs by.

    What was given to them may be others' numbers already.

    Args:
        stretch: of casts.
        floor: relative difference of values that agree.
    """
    casts = [v for op in stretch.working for v in op.outputs]
    unit = max(map(_unit, casts), default=0.0)
    spacing = max((_SPACING.get(v.dtype, 0.0) for v in casts), default=0.0)
    # memory that nothing has written yet is nothing to be held against
    changed = [(error(w, v), w) for v, w in stretch.changed if w.sketch is not None]
    return all(
        size is None or size <= _CAST * unit + floor + _flushed(spacing, w) for size, w in changed
    )


#: The distance of the numbers of a format around 0, where a rounding is no longer relative.
_SPACING = {"torch.float16": 2.0**-24}


def _flushed(spacing: float, value: Value) -> float:
    """By how much of its length rounding to numbers that lie so far apart may change a value."""
    return spacing / 2 * math.sqrt(math.prod(value.shape)) / value.norm if value.norm else 0.0


def _is_of_bits(op: Operator) -> bool:
    """Whether an operator works on the bits of floating-point numbers."""
    return meaning.plain(op) in _BITS and all(v.dtype in _FRACTION for v in op.outputs)


def _cleared(op: Operator) -> float:
    """Unit round-off of a float whose last bits an operator sets to 0; 0 where it sets none."""
    masks = [int(n) for n in numbers(op) if n == int(n)]
    if "and" not in meaning.plain(op) or not masks or not masks[0]:
        return 0.0
    kept = _FRACTION[op.outputs[0].dtype] - ((masks[0] & -masks[0]).bit_length() - 1)
    return 2.0**-kept if kept > 0 else 0.0


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
    """The larger or the smaller of each element and one number, or what is between two."""
    rest = [op for op in stretch.working if any(math.prod(v.shape) > 1 for v in op.outputs)]
    kinds = {meaning.plain(op) for op in rest}
    cuts = kinds <= meaning.CUTS | {"minimum", "maximum"}
    return bool(rest) and cuts and all(_has_bound(op) for op in rest)


def _has_bound(op: Operator) -> bool:
    sizes = [math.prod(v.shape) for v in op.inputs]
    return len(sizes) - sizes.count(1) == 1


# positions

_TURNS = frozenset({
    "cos", "sin", "polar", "mul", "add", "sub", "neg", "complex", "addcmul", "view_as_complex",
    "view_as_real", "outer", "bmm", "mm", "matmul", "pow",
}) | meaning.MOVES | meaning.CASTS  # fmt: skip
#: Relative difference of the norms before and after a rotation.
_ISOMETRY = 1e-3


def turns(stretch: Stretch) -> bool:
    """Vectors are rotated: their norms stay, and cosines and sines are what they are multiplied by.

    A table of cosines and one of sines of the same angles have squares that sum to one.
    """
    names = {meaning.plain(op) for op in stretch.working}
    if not stretch.changed or not names <= _TURNS or not names & {"mul", "addcmul"}:
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
        _is_table(one) and any(are_of_angles(one, other) for other in tables)
        for pair in stretch.changed
        for one in pair
    )


def _has_angles(values: Sequence[Value]) -> bool:
    tables = [v for v in values if _is_table(v)]
    return any(are_of_angles(one, other) for one in tables for other in tables)


def are_of_angles(one: Value, other: Value) -> bool:
    """Whether two values may be tables of cosines and of sines of the same angles.

    They may be of two traces, whose numbers of values mean nothing to each other.
    """
    return (
        _is_table(one)
        and _is_table(other)
        and one.shape == other.shape
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


# experts


def routed(stretch: Stretch) -> bool:
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
    ("sampling_semantics", vocabulary.of_fewer_ids),
    ("mask", _masks),
    ("rounding_order", _quantised),
    ("routing", routed),
    ("saturation", _of_part(meaning.CUTS)),
    ("saturation", _cut),
    ("constant_factor", _of_part(meaning.TIMES)),
    ("position", turns),
    ("sampling_semantics", vocabulary.truncated),
    ("sampling_semantics", vocabulary.tempered),
)
