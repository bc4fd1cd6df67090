"""Values that something outside the trace has written to, between the operators that were seen.

An operator makes a value and a later one is given other numbers under it: a kernel past the
dispatcher, or code that was not watched, has changed it. Where that happens on one side alone it is
a cause, whatever it was that wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlprobe.refine.difference import IMPLEMENTATION, Difference
from rlprobe.refine.pairing import Both
from rlprobe.refine.trace import Operator, Trace
from rlprobe.said import of_side, say


class Written:
    """What each operator was given that is no longer as it was made.

    Args:
        traces: the benchmark's and the target's.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        self._found = [_changed(trace.operators) for trace in traces]

    def difference(self, step: Both) -> Difference | None:
        """What was written to before this operator on one side alone; None where nothing was."""
        own = [found.get(op.n, {}) for found, op in zip(self._found, _sides(step), strict=True)]
        for name, side in (("benchmark", 0), ("target", 1)):
            lone = [place for place in own[side] if place not in own[1 - side]]
            if not lone:
                continue
            op = _sides(step)[side]
            said = say(
                "what {maker} made is other numbers on the {side} when {operator} is given it: "
                "something outside the operators that were traced has written to it",
                maker=own[side][lone[0]].said,
                side=of_side(name),
                operator=op.said,
            )
            return Difference(self._cause(op), said, True, "written")
        return None

    def _cause(self, op: Operator) -> str:
        """In the update, gradients' sums are all that the backward pass hands from call to call."""
        adds = self._traces[0].kind == "update" and op.direction == "backward"
        return "accumulation" if adds else IMPLEMENTATION


def _sides(step: Both) -> tuple[Operator, Operator]:
    return step.benchmark, step.target


def _changed(operators: Sequence[Operator]) -> dict[int, dict[int, Operator]]:
    """By operator's number: the places of its inputs that are not as made, and who made them.

    An operator that was traced may write to a value by another view of the same memory: that is
    none of these.
    """
    made: dict[int, _Made] = {}
    touched: dict[int, int] = {}
    found: dict[int, dict[int, Operator]] = {}
    for at, op in enumerate(operators):
        for place, value in enumerate(op.inputs):
            known = made.get(value.value)
            if known is None or value.digest in (None, known.digest):
                continue
            if touched.get(value.storage, -1) <= known.at:
                found.setdefault(op.n, {})[place] = known.maker
            made[value.value] = _Made(value.digest, known.maker, at)
        for value in op.outputs:
            touched[value.storage] = at
            if value.digest is not None:
                made[value.value] = _Made(value.digest, op, at)
    return found


class _Made(NamedTuple):
    """What a value held last, who made it, and when that was seen."""

    digest: str | None
    maker: Operator
    at: int
