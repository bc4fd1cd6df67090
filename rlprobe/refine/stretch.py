"""A stretch of operators that one side alone ran, and what became of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rlprobe.refine import meaning
from rlprobe.refine.trace import Operator, Trace, Value

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


def argument(op: Operator, *names: str) -> int | None:
    """A whole number among an operator's arguments; None where it is not said, or several are."""
    for argument in op.arguments:
        if argument.name in names:
            found = argument.scalar
            found = found[0] if isinstance(found, list) and len(found) == 1 else found
            return found if isinstance(found, int) else None
    return None


def hides(number: float) -> bool:
    """Whether a score of so little is one that is masked."""
    return number <= meaning.MASKED


def numbers(op: Operator) -> list[float]:
    """Numbers among an operator's arguments, as scalars or as tensors of one element."""
    found = [a.scalar for a in op.arguments if not a.tensors and not a.default]
    found += [v.elements[0] for v in op.inputs if v.shape == [] and v.elements]
    return [float(n) for n in found if _is_number(n)]


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value in ("inf", "-inf")
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def last(value: Value) -> int:
    """The size of a value's last dimension."""
    return value.shape[-1] if value.shape else 1
