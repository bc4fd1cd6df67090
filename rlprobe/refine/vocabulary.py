"""What is done to the scores of a vocabulary before anything is made of them.

Around the model alone: what a token's log-probabilities are of is another distribution where its
scores are put in order, multiplied by one number, left out or hidden.
"""

from __future__ import annotations

from rlprobe.refine import meaning
from rlprobe.refine.stretch import Stretch, argument, hides, last, numbers

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
    cut = {
        v.value
        for op in stretch.operators
        if meaning.plain(op) in meaning.MOVES and any(last(v) in sizes for v in op.inputs)
        for v in op.outputs
        if 1 < last(v) < max(sizes, default=0)
    }
    if any(last(w) in sizes and 1 < last(v) < last(w) for v, w in stretch.changed):
        return True
    hidden = False
    for op in stretch.operators:
        kind = meaning.plain(op).lstrip("_")
        hidden = hidden or any(map(hides, numbers(op)))
        whole = any(last(v) in sizes for v in op.outputs)
        if kind in _NORMALISE and any(v.value in cut for v in op.inputs):
            return True
        if whole and kind in _PUTS and any(map(hides, numbers(op))):
            return True
        if whole and hidden and kind == "cat" and any(v.value in cut for v in op.inputs):
            return True
    return False


def _vocabularies(stretch: Stretch) -> set[int]:
    """How many scores the model gives a token, where it is what surrounds the model."""
    outputs = (
        v
        for op in stretch.trace.operators
        for v in op.inputs
        if v.origin is not None and v.origin.startswith("model output")
    )
    return {size for v in outputs if (size := last(v)) > 1} if stretch.around else set()
