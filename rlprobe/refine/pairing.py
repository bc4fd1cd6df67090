"""Which operator of one trace answers which of the other.

Traces of the same code are the same but for what differs: a common beginning and end are taken
first, and what is left is aligned by the fewest operators without a partner (the algorithm of
S. Needleman and C. Wunsch, 1970), preferring partners with equal arguments, of the same function.
Operators of other functions with other arguments and other numbers are nobody's partner: nothing
is known of them together.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from rlprobe.refine import meaning
from rlprobe.refine.trace import Operator, error

#: Cells of the table of an alignment; beyond, what is left is one piece that differs.
_CELLS = 4_000_000
_SAME_NAME, _SAME_SCALARS, _SAME_SHAPES, _SAME_VALUES = 4, 2, 1, 2
_SAME_PLACE, _SAME_LINE, _SAME_DTYPES = 3, 1, 1
#: Relative difference of values that are taken for one another's.
_CLOSE = 1e-2


@dataclass(frozen=True)
class Both:
    """An operator that ran on both sides."""

    benchmark: Operator
    target: Operator


@dataclass(frozen=True)
class Apart:
    """A stretch in which the sides ran other operators; one of the two may be empty."""

    benchmark: list[Operator]
    target: list[Operator]


def pair(benchmark: list[Operator], target: list[Operator]) -> list[Both | Apart]:
    """The operators of two traces, in order."""
    least = min(len(benchmark), len(target))
    head = 0
    while head < least and _alike(benchmark[head], target[head]):
        head += 1
    tail = 0
    while tail < least - head and _alike(benchmark[-1 - tail], target[-1 - tail]):
        tail += 1
    found: list[Both | Apart] = [
        Both(b, t) for b, t in zip(benchmark[:head], target[:head], strict=True)
    ]
    ends = len(benchmark) - tail, len(target) - tail
    found += _middle(benchmark[head : ends[0]], target[head : ends[1]])
    found += [Both(b, t) for b, t in zip(benchmark[ends[0] :], target[ends[1] :], strict=True)]
    return found


def _alike(b: Operator, t: Operator) -> bool:
    """Whether two operators may be each other's without a look at those around them."""
    return (
        b.name == t.name
        and b.direction == t.direction
        and _same_place(b, t)
        and _dtypes(b) == _dtypes(t)
        and [v.shape for v in b.inputs] == [v.shape for v in t.inputs]
        and scalars(b) == scalars(t)
    )


def _same_place(b: Operator, t: Operator) -> bool:
    """Whether the same function called both, wherever in it; in a backward pass the same node."""
    return _function(b) == _function(t) and b.node == t.node


def _function(op: Operator) -> str | None:
    """``modeling.py forward`` of ``modeling.py:210 forward``."""
    if op.site is None:
        return None
    file, _, rest = op.site.partition(":")
    return f"{file} {rest.partition(' ')[2]}"


def _dtypes(op: Operator) -> list[str]:
    return [value.dtype for value in op.inputs]


def scalars(op: Operator) -> list[tuple[str, object]]:
    """Its arguments that are no tensors, by name."""
    return [(a.name, a.scalar) for a in op.arguments if not a.tensors]


def _score(b: Operator, t: Operator) -> int:
    if b.name != t.name or b.direction != t.direction:
        return -1
    place, equal = _same_place(b, t), scalars(b) == scalars(t)
    digests = [v.digest for v in b.inputs]
    given = None not in digests and digests == [v.digest for v in t.inputs]
    if not place and not _may_be_one(b, t, equal, given):
        return -1  # a name is all that they have in common
    score = _SAME_NAME
    score += _SAME_PLACE * place + _SAME_LINE * (place and b.site == t.site)
    score += _SAME_SCALARS * equal
    score += _SAME_SHAPES * ([v.shape for v in b.inputs] == [v.shape for v in t.inputs])
    score += _SAME_DTYPES * (_dtypes(b) == _dtypes(t))
    score += _SAME_VALUES * given
    return score


def _may_be_one(b: Operator, t: Operator, equal: bool, given: bool) -> bool:
    """Whether operators of two functions may be each other's: they work on the same shapes, with
    the same arguments or on the same numbers; what lays numbers out does with both. A product of
    two tensors, of which one is the same, may be given another one in the other's place."""
    if [v.shape for v in b.inputs] != [v.shape for v in t.inputs] or _dtypes(b) != _dtypes(t):
        return False
    same = given or given_alike(b, t)
    if meaning.plain(t) in meaning.MOVES | meaning.VIEWS:
        return equal and same
    return same or (equal and bool(scalars(b))) or _given_one_alike(b, t)


def given_alike(b: Operator, t: Operator) -> bool:
    """Whether two operators are given about the same numbers."""
    if not b.inputs or len(b.inputs) != len(t.inputs) or _dtypes(b) != _dtypes(t):
        return False
    sizes = (error(one, other) for one, other in zip(b.inputs, t.inputs, strict=True))
    return all(size is not None and size <= _CLOSE for size in sizes)


def _given_one_alike(b: Operator, t: Operator) -> bool:
    """Whether two operators on two tensors or more are given about the same in one of them."""
    pairs = [(v, w) for v, w in zip(b.inputs, t.inputs, strict=True) if math.prod(v.shape) > 1]
    sizes = [error(v, w) for v, w in pairs]
    return len(pairs) > 1 and any(size is not None and size <= _CLOSE for size in sizes)


def _middle(benchmark: list[Operator], target: list[Operator]) -> list[Both | Apart]:
    n, m = len(benchmark), len(target)
    if not n or not m or n * m > _CELLS:
        return [Apart(benchmark, target)] if n or m else []
    scores = np.array([[_score(b, t) for t in target] for b in benchmark])
    table = np.zeros((n + 1, m + 1), dtype=np.int64)
    for i in range(n - 1, -1, -1):
        for j in range(m - 1, -1, -1):
            best = max(table[i + 1, j], table[i, j + 1])
            if scores[i, j] > 0:
                best = max(best, table[i + 1, j + 1] + scores[i, j])
            table[i, j] = best
    found: list[Both | Apart] = []
    lone: tuple[list[Operator], list[Operator]] = ([], [])
    i = j = 0
    while i < n or j < m:
        taken = (
            i < n and j < m and scores[i, j] > 0
            and table[i, j] == table[i + 1, j + 1] + scores[i, j]
        )  # fmt: skip
        if taken:
            if lone[0] or lone[1]:
                found.append(Apart(*lone))
                lone = ([], [])
            found.append(Both(benchmark[i], target[j]))
            i, j = i + 1, j + 1
        elif j == m or (i < n and table[i + 1, j] >= table[i, j + 1]):
            lone[0].append(benchmark[i])
            i += 1
        else:
            lone[1].append(target[j])
            j += 1
    if lone[0] or lone[1]:
        found.append(Apart(*lone))
    return found


def reordered(steps: list[Both | Apart]) -> list[Both | Apart]:
    """Steps in which operators that both sides run in another order have their partners.

    The order of what does not depend on each other is no difference. A module within has its name,
    where it ran once on either side; an operator is known by what it is given, where that is the
    same for it alone.
    """
    partners = _partners(steps)
    taken = {id(b) for b in partners.values()} | {*partners}
    found: list[Both | Apart] = []
    lone: tuple[list[Operator], list[Operator]] = ([], [])
    #: Partners from within a stretch: what it means is told by all of it.
    within: list[Both | Apart] = []

    def flush() -> None:
        if lone[0] or lone[1]:
            found.append(Apart([*lone[0]], [*lone[1]]))
        found.extend(within)
        for each in (*lone, within):
            each.clear()

    for step in steps:
        if isinstance(step, Both) and not {id(step.benchmark), id(step.target)} & taken:
            flush()
            found.append(step)
            continue
        lone[0].extend(op for op in _operators(step, 0) if id(op) not in taken)
        for op in _operators(step, 1):
            if id(op) not in partners:
                lone[1].append(op)
                continue
            within.append(Both(partners[id(op)], op))
            if op.name.startswith("module::"):
                flush()
    flush()
    return found


def _partners(steps: list[Both | Apart]) -> dict[int, Operator]:
    """The benchmark's operator by the target's (its identity), of those that have changed order."""
    free: tuple[dict[str, list[Operator]], dict[str, list[Operator]]] = ({}, {})
    for step in steps:
        if isinstance(step, Both) and not _is_given_others(step):
            continue
        for side in (0, 1):
            for op in _operators(step, side):
                free[side].setdefault(op.name, []).append(op)
    calls = Counter(
        op.name for step in steps for op in (*_operators(step, 0), *_operators(step, 1))
    )
    found: dict[int, Operator] = {}
    for name in free[0].keys() & free[1].keys():
        benchmark, target = free[0][name], free[1][name]
        if name.startswith("module::"):
            if calls[name] == 2:
                found[id(target[0])] = benchmark[0]
        elif meaning.plain(target[0]) not in meaning.MOVES | meaning.VIEWS | meaning.MAKES:
            found |= _matched(benchmark, target)
    return found


def _matched(benchmark: list[Operator], target: list[Operator]) -> dict[int, Operator]:
    """Operators of one name that are each given what one of the other side alone is given."""
    if len(benchmark) * len(target) > _MATCHED:
        return {}
    alike = [[_is_one(b, t) for t in target] for b in benchmark]
    return {
        id(t): b
        for i, b in enumerate(benchmark)
        for j, t in enumerate(target)
        if alike[i][j] and sum(alike[i]) == 1 and sum(row[j] for row in alike) == 1
    }


#: Pairs of operators of one name that are looked at.
_MATCHED = 10_000


def _is_one(b: Operator, t: Operator) -> bool:
    same = b.direction == t.direction and scalars(b) == scalars(t)
    return same and [v.shape for v in b.inputs] == [v.shape for v in t.inputs] and given_alike(b, t)


def _is_given_others(step: Both) -> bool:
    """Whether two operators that were taken for each other are given other numbers."""
    pairs = zip(step.benchmark.inputs, step.target.inputs, strict=False)
    sizes = [error(one, other) for one, other in pairs]
    return any(size is None or size > _CLOSE for size in sizes)


def _operators(step: Both | Apart, side: int) -> list[Operator]:
    if isinstance(step, Both):
        return [(step.benchmark, step.target)[side]]
    return (step.benchmark, step.target)[side]
