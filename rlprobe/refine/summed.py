"""Gradients that autograd's engine adds up between operators, where no dispatcher sees it.

What is used twice is given back two gradients, and the engine hands on their sum as a value from
elsewhere. Sketches are linear: that of the sum is the sum of theirs, which tells that traced
operators made it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from msgspec import structs

from rlprobe.judge.roundoff import UNIT
from rlprobe.refine.trace import ELSEWHERE, ROUND_OFFS, Operator, Trace, Value, decoded

#: Terms, and the last gradients of a shape that they are looked for among.
_TERMS, _LAST = 4, 16


def known(trace: Trace) -> Trace:
    """A trace in which such a sum comes from no elsewhere, as what a traced operator made."""
    # an update adds gradients up by operators, which are traced
    found = sums(trace) if trace.kind != "update" else set()
    if not found:
        return trace
    operators = [
        op if not found & {v.value for v in _entering(op)} else _known(op, found)
        for op in trace.operators
    ]
    return replace(trace, operators=operators)


def _known(op: Operator, found: set[int]) -> Operator:
    arguments = [
        structs.replace(
            argument,
            tensors=[
                structs.replace(v, origin=None) if v.value in found else v for v in argument.tensors
            ],
        )
        for argument in op.arguments
    ]
    return structs.replace(op, arguments=arguments)


def sums(trace: Trace) -> set[int]:
    """Values from elsewhere that are gradients of traced operators, added up."""
    found: set[int] = set()
    made: dict[tuple[int, ...], list[Value]] = {}
    for op in trace.operators:
        if op.direction == "forward":
            continue
        entering = _entering(op)
        found |= {v.value for v in entering if _is_sum(v, made.get(tuple(v.shape), []))}
        # what arrives is handed on as well, as beside a residual branch
        for value in (*entering, *op.outputs):
            made.setdefault(tuple(value.shape), []).append(value)
    return found


def _entering(op: Operator) -> list[Value]:
    return [v for v in op.inputs if v.origin == ELSEWHERE and math.prod(v.shape) > 1]


def _is_sum(value: Value, gradients: list[Value]) -> bool:
    """Whether a value is the sum of some of the gradients before it."""
    own = decoded(value.sketch)
    terms = [
        (row, gradient.norm)
        for gradient in gradients[-_LAST:]
        if (row := decoded(gradient.sketch)) is not None and gradient.norm
        and gradient.dtype == value.dtype
    ]  # fmt: skip
    if own is None or not value.norm:
        return False
    unit = max(UNIT.get(value.dtype, 0.0), UNIT["torch.float32"])
    return any(
        _agree(own, [row for row, _ in some], ROUND_OFFS * unit * sum(norm for _, norm in some))
        for count in range(2, _TERMS + 1)
        for some in itertools.combinations(terms, count)
    )


def _agree(
    own: npt.NDArray[np.float64], terms: list[npt.NDArray[np.float64]], allowed: float
) -> bool:
    return float(np.linalg.norm(own - np.sum(terms, axis=0))) <= allowed
