"""Operators that both sides run and one of them alone has a use for."""

from __future__ import annotations

from collections import Counter

from rlprobe.refine.pairing import given_alike, scalars
from rlprobe.refine.trace import Operator, Trace

_Key = tuple[object, ...]


def unused(one: Trace, other: Trace) -> set[int]:
    """Operators that one side's results depend on by a number alone, and that the other runs too.

    Where the other does not use that number, they are no operators of one side alone: the number's
    own use is what differs.
    """
    ran = [Counter(_key(op) for op in side.operators) for side in (one, other)]
    plain = {op.n for op in one.live(numbers=False)}
    by_number = [op for op in one.live() if op.n not in plain]
    return {op.n for op in by_number if ran[1][_key(op)] >= ran[0][_key(op)]}


class Idle:
    """What a side runs and its results do not depend on.

    Operators that the other side runs for a use are no operators of that side alone where this one
    has run them for nothing: the use is what differs.
    """

    def __init__(self, trace: Trace) -> None:
        live = {op.n for op in trace.live()}
        self._left = [op for op in trace.operators if op.n not in live]

    def without(self, operators: list[Operator]) -> list[Operator]:
        """Those of the other side's operators that this one does not run."""
        found = []
        for op in operators:
            own = next((left for left in self._left if _are_one(left, op)), None)
            if own is None:
                found.append(op)
            else:
                self._left.remove(own)
        return found


def _are_one(left: Operator, op: Operator) -> bool:
    """Whether two operators are the same one: of one place in the code, or on the same numbers."""
    if left.name != op.name or left.direction != op.direction:
        return False
    return _key(left) == _key(op) or (scalars(left) == scalars(op) and given_alike(left, op))


def _key(op: Operator) -> _Key:
    """What tells an operator from others of a trace: its name, place in the code and shapes."""
    shapes = tuple(tuple(value.shape) for value in op.inputs)
    return op.name, op.site, op.node, op.direction, shapes, str(scalars(op))
