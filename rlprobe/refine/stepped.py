"""What an optimizer's step does to parameters by operators of one side alone."""

from __future__ import annotations

from collections.abc import Sequence

from rlprobe.refine import meaning
from rlprobe.refine.stretch import Stretch
from rlprobe.refine.trace import Operator, Trace


def writes_parameters(trace: Trace, operators: Sequence[Operator]) -> bool:
    """Whether all operators are of a step and work in place on parameters, and change one."""
    own = _in_place(trace, operators, "parameter ")
    return len(own) == len(operators) and any(map(_changes, own))


def writes_gradients(trace: Trace, operators: Sequence[Operator]) -> bool:
    """Whether one of the operators of a step works in place on gradients, and changes them."""
    return any(map(_changes, _in_place(trace, operators, "gradient of ")))


def _in_place(trace: Trace, operators: Sequence[Operator], named: str) -> list[Operator]:
    """Those of a step that write to nothing but memory that came in by a name that begins so."""
    storages = {
        v.storage for op in trace.operators for v in op.inputs
        if v.origin is not None and v.origin.startswith(named)
    }  # fmt: skip
    return [
        op
        for op in operators
        if op.direction == "forward" and all(v.storage in storages for v in op.outputs)
    ]


def _changes(op: Operator) -> bool:
    return any(
        given.value == made.value and given.digest != made.digest
        for made in op.outputs
        for given in op.inputs
    )


def multiplies(stretch: Stretch) -> bool:
    """Whether operators of one side do nothing but multiply parameters in place by numbers.

    That is of the optimizer, whichever number it is.
    """
    times = bool(stretch.working) and all(
        meaning.plain(op) in meaning.TIMES for op in stretch.working
    )
    if stretch.trace.kind != "update" or not times:
        return False
    return writes_parameters(stretch.trace, stretch.working)
