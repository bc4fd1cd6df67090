"""What is done to the scores of a vocabulary before anything is made of them.

Around the model alone: what a token's log-probabilities are of is another distribution where its
scores are put in order, multiplied by one number, left out or hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlprobe.refine import meaning
from rlprobe.refine.stretch import Stretch, argument, hides, last, numbers
from rlprobe.refine.trace import Operator, Trace, Value

_ORDERS = frozenset({"sort", "topk", "kthvalue", "argsort"})


def truncated(stretch: Stretch) -> bool:
    """A vocabulary's scores are put in order: what draws from the first of them does that."""
    sizes = _vocabularies(stretch)
    return any(
        meaning.plain(op) in _ORDERS
        and any(v.shape and v.shape[-1] in sizes for v in op.inputs)
        and argument(op, "dim") in (-1, len(op.inputs[0].shape) - 1)
        for op in stretch.working
    )


def tempered(stretch: Stretch) -> bool:
    """All scores of a token are multiplied by one number before anything is made of them."""
    sizes = _vocabularies(stretch)
    of_scores = [op for op in stretch.working if last(op.outputs[0]) in sizes]
    return bool(of_scores) and all(
        meaning.plain(op) in meaning.TIMES
        and sum(last(v) in sizes for v in op.inputs) == 1
        and all(last(v) in {*sizes, 1} for v in op.inputs)
        for op in of_scores
    ) and all(last(v) in sizes for v, _ in stretch.changed)  # fmt: skip


_NORMALISE = frozenset({
    "logsumexp", "log_softmax", "softmax", "sum", "cross_entropy_loss", "nll_loss_forward",
})  # fmt: skip
_PUTS = frozenset({
    "masked_fill", "where", "index_fill", "scatter", "index_put", "fill", "copy", "add",
})  # fmt: skip


def of_fewer_ids(stretch: Stretch) -> bool:
    """A token's probabilities are of a part of the vocabulary, or of one whose scores are hidden.

    Scores are normalised over fewer ids than the model scores, or some of them are first set to
    what no probability is left of.
    """
    sizes = _vocabularies(stretch)
    parts = _Parts(stretch.operators, sizes)
    if any(last(w) in sizes and parts.is_lacking(v) for v, w in stretch.changed):
        return True
    hidden = False
    for op in stretch.operators:
        kind = meaning.plain(op).lstrip("_")
        hidden = hidden or any(map(hides, numbers(op)))
        whole = any(last(v) in sizes for v in op.outputs)
        if kind in _NORMALISE and any(map(parts.is_lacking, op.inputs)):
            return True
        if whole and kind in _PUTS and any(map(hides, numbers(op))):
            return True
        if whole and hidden and kind == "cat" and any(map(parts.is_lacking, op.inputs)):
            return True
    return False


def narrowed(benchmark: Trace, target: Trace) -> bool:
    """Whether the target alone normalises over fewer ids than the model scores."""
    return not _normalises_part(benchmark) and _normalises_part(target)


def _normalises_part(trace: Trace) -> bool:
    sizes = _vocabularies(Stretch(trace, trace.operators, []))
    parts = _Parts(trace.operators, sizes)
    return any(
        meaning.plain(op).lstrip("_") in _NORMALISE and any(map(parts.is_lacking, op.inputs))
        for op in trace.live()
    )


class _Parts:
    """Parts that are taken of a vocabulary's scores.

    Args:
        operators: that take them.
        sizes: of vocabularies.
    """

    def __init__(self, operators: Iterable[Operator], sizes: set[int]) -> None:
        self._whole: dict[int, tuple[int, int]] = {}
        self._taken: Counter[int] = Counter()
        for op in operators:
            self._follow(op)
            whole = next((v for v in op.inputs if last(v) in sizes), None)
            if whole is None or meaning.plain(op) not in meaning.MOVES:
                continue
            for part in op.outputs:
                if 1 < last(part) < last(whole) and part.value not in self._whole:
                    self._whole[part.value] = whole.value, last(whole)
                    self._taken[whole.value] += last(part)

    def _follow(self, op: Operator) -> None:
        """What is made of a part, element by element, is of the same ids."""
        part = next((v for v in op.inputs if v.value in self._whole), None)
        for made in op.outputs if part is not None else ():
            if part is not None and last(made) == last(part):
                self._whole.setdefault(made.value, self._whole[part.value])

    def is_lacking(self, value: Value) -> bool:
        """Whether a value is a part, and all parts of its scores together are not all of them.

        A vocabulary may be gone through piece by piece.
        """
        whole, size = self._whole.get(value.value, (-1, 0))
        return 0 < self._taken[whole] < size


def _vocabularies(stretch: Stretch) -> set[int]:
    """How many scores the model gives a token, where it is what surrounds the model."""
    outputs = (
        v
        for op in stretch.trace.operators
        for v in op.inputs
        if v.origin is not None and v.origin.startswith("model output")
    )
    return {size for v in outputs if (size := last(v)) > 1} if stretch.around else set()
