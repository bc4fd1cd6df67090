"""What an operator or an argument means, where that alone is a cause.

This is no reading of numbers: an argument called ``eps`` is an epsilon, and an operator that only
moves elements moves them. What has no meaning of its own is another implementation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlprobe.judge.roundoff import UNIT
from rlprobe.refine.trace import Operator, Value

#: Words in the name of an argument or of a parameter -> cause class.
_WORDS: tuple[tuple[str, str], ...] = (
    ("mask", "mask"),
    ("causal", "mask"),
    ("window", "mask"),
    ("position", "position"),
    ("inv_freq", "position"),
    ("rotary", "position"),
    ("dropout", "nondeterministic"),
    ("eps", "hyperparameter"),
    ("weight", "weights"),
    ("bias", "weights"),
)
#: Operators, without namespace, overload and the mark of an operator in place.
MOVES = frozenset({
    "roll", "flip", "fliplr", "flipud", "index_select", "index", "gather", "permute", "transpose",
    "t", "cat", "stack", "slice", "select", "split", "split_with_sizes", "chunk", "unbind",
    "take_along_dim", "rot90", "narrow", "repeat", "repeat_interleave",
})  # fmt: skip
VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "clone", "contiguous", "unsqueeze", "squeeze", "copy",
    "empty_like", "as_strided", "flatten", "unflatten", "empty", "_reshape_alias", "view_as",
    "arange", "lift_fresh", "sym_size", "expand", "values", "_nested_get_values",
    "_nested_view_from_jagged", "_nested_view_from_buffer",
    # a number that code takes off a tensor is seen where it is an argument
    "_local_scalar_dense",
})  # fmt: skip
#: Arguments that say along which dimensions an operator works: no constant of a computation.
_STRUCTURE = frozenset({
    "dim", "dims", "dim0", "dim1", "size", "keepdim", "axis", "start_dim", "end_dim", "descending",
    "half_to_float", "correction", "reduction", "memory_format", "exponent", "ord", "norm_type",
})  # fmt: skip
#: Make constants, which have no effect but through what uses them.
MAKES = frozenset({
    "ones", "zeros", "full", "scalar_tensor", "ones_like", "zeros_like", "full_like", "new_ones",
    "new_zeros", "new_full", "lift_fresh_copy",
})  # fmt: skip
CASTS = frozenset({"_to_copy", "to", "type_as", "prims_convert_element_type", "npu_dtype_cast"})
TIMES = frozenset({"mul", "div", "neg", "true_divide", "_foreach_mul", "_foreach_div"})
_COUNTS = frozenset({"sum", "cumsum", "count_nonzero", "bincount", "nonzero", "diff"})
CUTS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh", "clip"})
_MASKS = frozenset({"tril", "triu"})
_RANDOM = frozenset({
    "rand", "rand_like", "randn", "randn_like", "bernoulli", "native_dropout", "dropout", "uniform",
    "normal", "random", "_fused_dropout",
})  # fmt: skip
#: Namespaces of collectives.
_COLLECTIVES = ("c10d::", "_c10d_functional::")
#: Lowest value from which on a tensor that is added is a mask.
MASKED = -1e4


def plain(op: Operator) -> str:
    """``add`` of ``aten::add_.Tensor``."""
    return op.name.rpartition("::")[2].split(".")[0].rstrip("_")


def of_name(name: str) -> str | None:
    """The cause class that a name stands for."""
    lowered = name.lower()
    return next((cause for word, cause in _WORDS if word in lowered), None)


def of_batch(name: str) -> str:
    """The cause class of an entry of the batch that a stage was given otherwise."""
    if "mask" in name:
        return "label_or_mask_shift"
    return "position" if "position" in name else "data"


def of_scalar(op: Operator, argument: str, *values: object) -> str:
    """The cause class of an argument that has other values on the two sides.

    A constant is a number that a computation is told. Dimensions, words, switches and which power
    or norm is taken are another computation, and a number is no parameter of a model.
    """
    if plain(op) in ("tril", "triu"):
        return "mask"
    if argument in ("dtype", "other_dtype"):
        return "rounding_order"
    if plain(op) in MOVES | {"expand"}:
        return "layout"
    if plain(op) in VIEWS or argument in _STRUCTURE:
        return "implementation"
    named = of_name(argument)
    if named not in (None, "weights"):
        return named
    switch = any(isinstance(v, (str, bool)) and v not in _ENDLESS for v in values)
    return "implementation" if switch else "hyperparameter"


#: Numbers that are written as words.
_ENDLESS = ("inf", "-inf", "nan")


#: Operators that put one number in others' place.
_PUTS = frozenset({
    "masked_fill", "where", "full", "fill", "new_full", "full_like", "index_fill", "scatter",
    "scalar_tensor",
})  # fmt: skip


def unmasks(op: Operator, one: object, other: object) -> bool:
    """Whether a number that an operator puts in others' place hides a score on one side alone."""
    return plain(op) in _PUTS and None not in (one, other) and _hides(one) is not _hides(other)


def _hides(number: object) -> bool:
    whole = isinstance(number, (int, float)) and not isinstance(number, bool)
    return number == "-inf" or (whole and number <= MASKED)  # type: ignore[operator]


def is_collective(op: Operator) -> bool:
    """Whether processes exchange numbers in an operator."""
    return op.name.startswith(_COLLECTIVES)


def is_mask(value: Value) -> bool:
    """Whether a tensor is one that is added to scores, or a boolean one."""
    if value.dtype == "torch.bool":
        return True
    low = float(value.min) if value.min is not None else 0.0
    high = float(value.max) if value.max is not None else 1.0
    return low <= MASKED and high <= 0.0


def of_operators(operators: Sequence[Operator], around: bool = False) -> str:
    """The cause class of operators that only one side ran.

    Args:
        operators: a stretch of them.
        around: they surround the model, where whole numbers are labels and truth values masks.
    """
    working = [op for op in operators if plain(op) not in VIEWS | MAKES]
    names = {plain(op) for op in working}
    if not names:
        return "implementation"
    if names & _RANDOM:
        return "nondeterministic"
    if any(map(is_collective, working)):
        return "reduction"
    made = [value for op in working for value in op.outputs]
    # one whole number is a count, and so is a sum of them: no labels
    counts = bool(names & _COUNTS) or not any(map(_is_several, made))
    if around and all(map(_is_whole, made)) and not counts:
        return "label_or_mask_shift"
    if names <= CASTS:
        shorter = any(_unit(v) > min(map(_unit, op.inputs), default=1.0)
                      for op in working for v in op.outputs)  # fmt: skip
        return "rounding_order" if shorter else "implementation"
    return _of_numbers(working, names)


def _of_numbers(working: Sequence[Operator], names: set[str]) -> str:
    """The class of operators that work on numbers, whichever format they have."""
    if names <= TIMES and all(is_by_number(op) for op in working):
        return "constant_factor"
    if names <= CUTS:
        return "saturation"
    if names <= _MASKS | {"masked_fill", "where", "scalar_tensor"} and names & _MASKS:
        return "mask"
    if names == {"add"} and any(is_mask(v) for op in working for v in op.inputs):
        return "mask"
    if names <= MOVES and not any(_is_whole(v) for op in working for v in op.outputs):
        return "layout"
    return "implementation"


def _is_whole(value: Value) -> bool:
    return value.dtype.startswith(("torch.int", "torch.uint", "torch.bool"))


def _is_several(value: Value) -> bool:
    return math.prod(value.shape) > 1


def is_by_number(op: Operator) -> bool:
    """Whether an operator makes of one tensor, by one number, something that has numbers left."""
    sizes = [len(value.elements or ()) == 1 for value in op.inputs]
    one = len(sizes) == 1 or (len(sizes) == 2 and sizes.count(True) == 1)
    return one and not all(map(_is_gone, op.outputs))


def _is_gone(value: Value) -> bool:
    """Whether nothing of a value's numbers is left: all are 0, or none is finite."""
    return value.norm == 0.0 or (value.nonfinite or 0) >= max(math.prod(value.shape), 1)


def _unit(value: Value) -> float:
    return UNIT.get(value.dtype, 0.0)
