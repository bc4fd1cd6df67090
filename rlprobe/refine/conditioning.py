"""How much larger than its result an operator's own round-off may be.

A sum whose terms cancel is as exact as its terms are large, a product of matrices as its factors
are, an exponential as its argument is (N. J. Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, 2002, sections 1.7, 3.1 and 3.5). Two correct kernels differ by so much.
"""

from __future__ import annotations

import math

from rlprobe.refine import meaning
from rlprobe.refine.trace import Operator, Value

_SUMS = frozenset({"sum", "mean", "cumsum", "nansum", "add", "sub", "rsub", "index_add", "lerp",
                   "scatter_add", "chunk_cat", "var", "std",
                   "embedding_dense_backward"})  # fmt: skip
#: Something is added in place: what is added is no larger than the sum and what it is added to.
_ADDING = frozenset({"addcmul", "addcdiv"})
#: A gradient times a derivative that may be near 0, as the difference of what is not.
_BACK = frozenset({"silu_backward", "gelu_backward", "sigmoid_backward", "tanh_backward",
                   "_softmax_backward_data", "_log_softmax_backward_data"})  # fmt: skip
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "addmm", "baddbmm", "linear", "dot", "mv", "einsum",
                       "_grouped_mm", "convolution"})  # fmt: skip
_GROWING = frozenset({"exp", "exp2", "expm1", "sin", "cos", "tan", "_softmax", "_log_softmax",
                      "logsumexp", "sigmoid", "silu", "gelu"})  # fmt: skip


def factor(op: Operator) -> float:
    """The bound of its round-off over that of its results' last bits; at least 1."""
    kind = meaning.plain(op).removeprefix("_foreach_")
    made = max((value.norm or 0.0 for value in op.outputs), default=0.0)
    inputs = [value for value in op.inputs if value.norm is not None]
    if not made or not inputs:
        return 1.0
    if kind in _SUMS:
        given = sum(_norm(value) for value in inputs)
        terms = max(1.0, _elements(inputs) / max(1.0, _elements(op.outputs)))
        return max(1.0, given * math.sqrt(terms) / made)
    if kind in _ADDING:
        return 1.0 + 2.0 * _norm(op.inputs[0]) / made
    if kind in _BACK:
        return max(1.0, _norm(inputs[0]) / made)
    if kind in _PRODUCTS:
        large = sorted((_norm(value) for value in inputs), reverse=True)[:2]
        return max(1.0, math.prod(large) / made, sum(map(_norm, inputs)) / made)
    if kind in _GROWING:
        return max(1.0, *(_largest(value) for value in inputs))
    return 1.0


def _norm(value: Value) -> float:
    return value.norm or 0.0


def _elements(values: list[Value]) -> float:
    return float(max((math.prod(value.shape) for value in values), default=1))


def _largest(value: Value) -> float:
    ends = (value.max, value.min)
    finite = [float(end) for end in ends if end is not None and math.isfinite(float(end))]
    # what is masked is 0 in an exponential, and exactly so
    return max((abs(end) for end in finite if end > meaning.MASKED), default=1.0)
