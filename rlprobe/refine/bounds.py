"""How large a difference an operator can make of the differences of what it is given.

Where inputs agree within round-off, so do results. Where they differ by more, as after many layers,
what an operator does by itself shows only against a bound of what it makes of that: the norm of its
derivative, which the recorded norms and extremes give (an addition passes differences on as they
are, a product times the other factor's largest element, a softmax no more than there is). Of
operators without such a bound nothing is said.

Differences are absolute here, L2 norms: scores that are masked by -3.4e38 have no relative one, and
differ by what they differed by before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlprobe.diagnose.cause.hypotheses.experts import is_choice
from rlprobe.refine import meaning
from rlprobe.refine.trace import Operator, Value, error

#: What is smaller may be anything once something is divided by it.
_LEAST = 1e-100


@dataclass(frozen=True)
class Given:
    """An input, and by how much the sides' differ."""

    value: Value
    apart: float

    @property
    def peak(self) -> float:
        """Its largest element's size; infinite where it is not known."""
        return max(map(abs, _ends(self.value)))

    @property
    def low(self) -> float:
        """Its smallest element's size; 0 where elements of both signs may come near it."""
        ends = _ends(self.value)
        one_sign = ends[0] > _LEAST or ends[1] < -_LEAST
        return min(map(abs, ends)) if one_sign else 0.0

    @property
    def norm(self) -> float:
        return math.inf if self.value.norm is None else self.value.norm

    def spread(self, over: Value) -> float:
        """Its difference once it is repeated over all elements of a result."""
        return self.apart * math.sqrt(max(1.0, _count(over) / max(1, _count(self.value))))


def _ends(value: Value) -> tuple[float, float]:
    """Smallest and largest element."""
    if value.min is None or value.max is None:
        return -math.inf, math.inf
    return float(value.min), float(value.max)


def _count(value: Value) -> int:
    return math.prod(value.shape)


class Bounds:
    """Differences of values: measured, or bounded by those of what the values were made of.

    Steps are told in the order in which they ran.
    """

    def __init__(self) -> None:
        #: By the target's value and digest.
        self._made: dict[tuple[int, str | None], float] = {}

    def of(self, b: Operator, t: Operator) -> list[float] | None:
        """By how much each result may differ, but for the operator's round-off; None: unknown.

        Args:
            b, t: the operator on both sides, with equal arguments.
        """
        pairs = list(zip(b.inputs, t.inputs, strict=False))
        apart = [self._apart(one, other) for one, other in pairs]
        known = [size for size in apart if size is not None]
        alike = [v.shape for v in b.inputs] == [v.shape for v in t.inputs]
        if not alike or not known or len(known) != len(apart):
            return None
        if len(b.outputs) != len(t.outputs):
            return None
        # either side's norms and extremes: they are the same but for the difference itself
        sides = [_results(op, known) for op in (b, t)]
        bounds = [max(pair) for pair in zip(*sides, strict=True)]
        for made, size in zip(t.outputs, bounds, strict=True):
            self._made[made.value, made.digest] = size
        return bounds if all(map(math.isfinite, bounds)) else None

    def _apart(self, one: Value, other: Value) -> float | None:
        size = error(one, other)
        if size is not None and math.isfinite(size):
            return size * (one.norm or 1.0)
        return self._made.get((other.value, other.digest))


def _results(op: Operator, apart: Sequence[float]) -> list[float]:
    """By how much each of an operator's results may differ; infinite where nothing bounds it."""
    if not any(apart):
        return [0.0] * len(op.outputs)
    kind = meaning.plain(op)
    if kind.startswith("_foreach_"):
        kind = kind.removeprefix("_foreach_")
        each = zip(_each(op, apart), op.outputs, strict=True)
        return [_bound(op, kind, given, made) for given, made in each]
    given = [Given(value, size) for value, size in zip(op.inputs, apart, strict=True)]
    return [_bound(op, kind, given, made) for made in op.outputs]


def _each(op: Operator, apart: Sequence[float]) -> Iterator[list[Given]]:
    """What each operator is given of those that one on lists stands for."""
    sizes = iter(apart)
    lists = [[Given(v, next(sizes)) for v in argument.tensors] for argument in op.arguments]
    lists = [given for given in lists if given]
    for place in range(len(op.outputs)):
        yield [given[min(place, len(given) - 1)] for given in lists]


def _bound(op: Operator, kind: str, given: Sequence[Given], made: Value) -> float:
    law = _LAWS.get(kind)
    other_choice = any(g.apart and is_choice(g.value.dtype) for g in given)
    if law is None or other_choice:
        return math.inf
    found = law(op, given, made)
    return math.inf if math.isnan(found) else found


_Law = Callable[[Operator, Sequence[Given], Value], float]


def _number(op: Operator, name: str, default: float = 1.0) -> float:
    """The size of a number among the arguments."""
    named = (name, "scalars") if name == "value" else (name,)
    found = next((a.scalar for a in op.arguments if a.name in named and not a.tensors), default)
    every = found if isinstance(found, list) else [found]
    return max(abs(n) if isinstance(n, (int, float)) else math.inf for n in every or [default])


def _times(one: float, other: float) -> float:
    """A product in which nothing times anything is nothing."""
    return one * other if one and other else 0.0


def _growing(factor: float) -> _Law:
    """A function of each element, or one that mixes them, of that largest derivative."""
    return lambda _op, given, made: factor * sum(g.spread(made) for g in given)


def _add(op: Operator, given: Sequence[Given], made: Value) -> float:
    return max(1.0, _number(op, "alpha")) * sum(g.spread(made) for g in given)


def _copy(_op: Operator, given: Sequence[Given], made: Value) -> float:
    return given[-1].spread(made)


def _product(op: Operator, given: Sequence[Given], made: Value) -> float:
    if len(given) == 1:
        return given[0].apart * _number(op, "other" if _has(op, "other") else "scalar")
    one, other = given
    return _times(one.spread(made), other.peak) + _times(other.spread(made), one.peak)


def _has(op: Operator, name: str) -> bool:
    return any(a.name == name for a in op.arguments)


def _quotient(op: Operator, given: Sequence[Given], made: Value) -> float:
    if len(given) == 1:
        by = _number(op, "other" if _has(op, "other") else "scalar")
        return given[0].apart / by if by else math.inf
    return _divided(given[0], given[1], made)


def _divided(one: Given, other: Given, made: Value) -> float:
    if not other.low:
        return math.inf
    own = one.spread(made) / other.low
    return own + _times(other.spread(made), one.peak / other.low**2)


def _of_two_more(product: Callable[[Given, Given, Value], float]) -> _Law:
    """``self + value * (tensor1 · tensor2)``."""

    def law(op: Operator, given: Sequence[Given], made: Value) -> float:
        own, one, other = given
        return own.spread(made) + _times(_number(op, "value"), product(one, other, made))

    return law


def _multiplied(one: Given, other: Given, made: Value) -> float:
    return _times(one.spread(made), other.peak) + _times(other.spread(made), one.peak)


def _lerp(op: Operator, given: Sequence[Given], made: Value) -> float:
    weight = next((a.scalar for a in op.arguments if a.name == "weight"), None)
    if not isinstance(weight, (int, float)) or len(given) != 2:
        return math.inf
    return abs(1 - weight) * given[0].spread(made) + abs(weight) * given[1].spread(made)


def _matrices(op: Operator, given: Sequence[Given], made: Value) -> float:
    """A product of matrices, and what is added to it before or behind them."""
    added = [g for g in given if _name(op, g) in ("self", "bias", "input") and len(given) == 3]
    if meaning.plain(op) == "linear":
        added = [g for g in given if _name(op, g) == "bias"]
    factors = [g for g in given if g not in added and not is_choice(g.value.dtype)]
    if len(factors) != 2:
        return math.inf
    one, other = factors
    own = _times(one.apart, other.norm) + _times(other.apart, one.norm)
    return _number(op, "alpha") * own + _number(op, "beta") * sum(g.spread(made) for g in added)


def _name(op: Operator, given: Given) -> str:
    return next((a.name for a in op.arguments if given.value in a.tensors), "")


def _sum(mean: bool) -> _Law:
    def law(_op: Operator, given: Sequence[Given], made: Value) -> float:
        terms = _count(given[0].value) / max(1, _count(made))
        return given[0].apart * (terms**-0.5 if mean else math.sqrt(terms))

    return law


def _scattered(_op: Operator, given: Sequence[Given], _made: Value) -> float:
    """Rows that are added up by an index: all of them may be of one place."""
    rows = max(_count(g.value) for g in given if is_choice(g.value.dtype))
    return math.sqrt(rows) * sum(g.apart for g in given)


def _of_low(derivative: Callable[[float], float]) -> _Law:
    """A function that is steepest at the smallest element."""

    def law(_op: Operator, given: Sequence[Given], _made: Value) -> float:
        return given[0].apart * derivative(given[0].low) if given[0].low else math.inf

    return law


def _power(op: Operator, given: Sequence[Given], _made: Value) -> float:
    exponent = _number(op, "exponent", 2.0)
    if exponent != 2.0 or len(given) != 1:
        return math.inf
    return 2.0 * _times(given[0].peak, given[0].apart)


def _exponential(_op: Operator, given: Sequence[Given], made: Value) -> float:
    return _times(given[0].apart, max(map(abs, _ends(made))))


def _row(value: Value) -> float:
    """Root of the elements of a row."""
    return math.sqrt(value.shape[-1]) if value.shape else 1.0


def _log_softmax(_op: Operator, given: Sequence[Given], made: Value) -> float:
    return given[0].apart * (1.0 + _row(made))


def _back(of_gradient: float, of_value: float) -> _Law:
    """A gradient times a derivative, which is so large and so steep at the most."""

    def law(_op: Operator, given: Sequence[Given], _made: Value) -> float:
        gradient, value = given[:2]
        return of_gradient * gradient.apart + of_value * _times(value.apart, gradient.peak)

    return law


def _softmax_back(_op: Operator, given: Sequence[Given], made: Value) -> float:
    gradient, value = given[:2]
    return 2.0 * gradient.apart + (2.0 + _row(made)) * _times(value.apart, gradient.peak)


def _log_softmax_back(_op: Operator, given: Sequence[Given], made: Value) -> float:
    gradient, value = given[:2]
    own = (1.0 + _row(made)) * gradient.apart
    return own + _row(made) ** 2 * _times(value.apart, gradient.peak)


#: Functions of each element that differ by no more than what they are given, and what moves
#: elements, leaves some out or repeats all alike.
_PASSING = frozenset({
    "neg", "abs", "relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "masked_fill", "where",
    "minimum", "maximum", "sin", "cos", "tanh", "sigmoid", "softplus", "_softmax", "softmax",
    "logsumexp", "amax", "amin", "linalg_vector_norm", "norm", "t", "transpose", "permute", "cat",
    "stack", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "flip",
    "roll", "repeat", "detach", "alias", "view", "_unsafe_view", "reshape", "clone", "contiguous",
    "unsqueeze", "squeeze", "flatten", "unflatten", "_reshape_alias", "view_as", "expand", "tril",
    "triu", "slice_backward", "select_backward", "constant_pad_nd",
}) | meaning.CASTS  # fmt: skip

_LAWS: dict[str, _Law] = {
    **dict.fromkeys(_PASSING, _growing(1.0)),
    # largest derivatives: 1.0998 of x * sigmoid(x), 1.129 of x * Phi(x), 2 / sqrt(pi) of erf
    "silu": _growing(1.1), "gelu": _growing(1.13), "erf": _growing(1.13),
    "add": _add, "sub": _add, "rsub": _add, "copy": _copy,
    "mul": _product, "div": _quotient, "true_divide": _quotient,
    "addcmul": _of_two_more(_multiplied), "addcdiv": _of_two_more(_divided), "lerp": _lerp,
    **dict.fromkeys(("mm", "bmm", "matmul", "dot", "mv", "addmm", "baddbmm", "linear",
                     "_grouped_mm"), _matrices),
    "sum": _sum(False), "mean": _sum(True),
    "embedding_dense_backward": _scattered, "index_add": _scattered, "scatter_add": _scattered,
    "pow": _power, "square": _power,
    "sqrt": _of_low(lambda x: 0.5 * x**-0.5), "rsqrt": _of_low(lambda x: 0.5 * x**-1.5),
    "reciprocal": _of_low(lambda x: x**-2.0), "log": _of_low(lambda x: 1.0 / x),
    "exp": _exponential, "_log_softmax": _log_softmax, "log_softmax": _log_softmax,
    "silu_backward": _back(1.1, 0.5), "gelu_backward": _back(1.13, 0.8),
    "sigmoid_backward": _back(0.25, 1.0), "tanh_backward": _back(1.0, 2.0),
    "_softmax_backward_data": _softmax_back, "_log_softmax_backward_data": _log_softmax_back,
}  # fmt: skip
