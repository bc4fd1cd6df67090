"""Values that enter a trace: parameters, buffers, constants, masks, a batch, gradients.

No traced operator made them, so that a difference of theirs comes from outside. What the comparison
has judged already (a module's inputs, the model's outputs, gradients that arrive) is no difference
here; anything else may differ by the noise that such values have.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import meaning, rounded
from rlprobe.refine.difference import COLLECTIVE, CONSTANT, Difference, number, sized
from rlprobe.refine.trace import ELSEWHERE, ROUND_OFFS, Operator, Value, error
from rlprobe.said import NOTHING_SAID, of_side, say

#: Values that the comparison has judged, or leaves to what is made of them.
_JUDGED = ("input ", "module ", "model output ", "gradient of ")
#: Of these a mask that masks other elements is a difference all the same: it has no size.
_MASKS = ("input ",)
#: Values that earlier computations made, on either side for itself: they have noise.
_BATCH = "batch "
_COMPUTED = (_BATCH, ELSEWHERE)


class Changed(NamedTuple):
    """Whether an operator's results differ: by more than results may, and than a batch may."""

    results: bool
    of_batch: bool
    #: Whether the operator surrounds the model.
    around: bool = False

    def by(self, value: Value) -> bool:
        """Whether they do where that value differs."""
        return self.of_batch if (value.origin or "").startswith(_BATCH) else self.results


def entering(
    b: Operator, t: Operator, changed: Changed, noise: float, collective: Operator | None = None
) -> list[Difference]:
    """Differences of what an operator was given from outside the trace.

    Args:
        b, t: the operator on both sides.
        changed: whether its results differ.
        noise: relative difference that values computed elsewhere may have.
        collective: the one that ran on the target just before.
    """
    found = []
    for one, other in zip(b.arguments, t.arguments, strict=False):
        if one.name != other.name:
            continue
        apart = []
        for v, w in zip(one.tensors, other.tensors, strict=False):
            if v.origin is None or w.origin is None:
                continue
            if w.origin.startswith(_MASKS) and masks_others(v, w):
                found.append(_masked(b, t, other.name, w))
            if w.origin.startswith(_JUDGED):
                continue
            size = error(v, w)
            least = ROUND_OFFS * UNIT.get(v.dtype, 0.0)
            allowed = max(least, noise) if w.origin.startswith(_COMPUTED) else least
            if size and size > allowed:
                apart.append((size, v, w))
        if apart:
            found.append(_said(t, other.name, apart, changed, collective))
    return found


def masks_others(v: Value, w: Value) -> bool:
    """Whether two masks that say "never" alike mask other elements."""
    if not (meaning.is_mask(v) and meaning.is_mask(w)) or v.shape != w.shape:
        return False
    return v.digest != w.digest and (v.min, v.max) == (w.min, w.max)


def _masked(b: Operator, t: Operator, name: str, w: Value) -> Difference:
    said = say(
        "{value}, given to {operator} as {name}, masks other elements",
        value=w.origin or "",
        operator=t.said,
        name=name,
    )
    # scores beside the lowest number have no size: their digests tell
    changed = any(
        one.digest != other.digest for one, other in zip(b.outputs, t.outputs, strict=False)
    )
    return Difference("mask", said, changed, "value")


def _said(
    op: Operator,
    name: str,
    apart: list[tuple[float, Value, Value]],
    results: Changed,
    collective: Operator | None,
) -> Difference:
    """What is said of the values of one argument that differ; of a list, of all at once."""
    size, v, w = max(apart, key=lambda entry: entry[0])
    changed = results.by(w)
    known = w.origin if w.origin != ELSEWHERE else None
    if len(apart) == 1 and _is_constant(v) and _is_constant(w) and known is None:
        one, other = ((value.elements or [None])[0] for value in (v, w))
        said = say(
            "{name} {target} on the target instead of {benchmark} in {operator}",
            name=name,
            target=number(other),
            benchmark=number(one),
            operator=op.said,
        )
        cause = meaning.of_name(name) or "hyperparameter"
        if not results.around and meaning.unmasks(op, one, other):
            cause = "mask"
        return Difference(cause, said, changed, "value")
    how = (
        say(" by {size}", size=sized(size, math.prod(v.shape)))
        if size != float("inf")
        else NOTHING_SAID
    )
    if known is None and collective is not None:
        said = say(
            "what is there after {collective}, given to {operator} as {name}, differs{how}",
            collective=collective.said,
            operator=op.said,
            name=name,
            how=how,
        )
        return Difference("unknown", said, changed, COLLECTIVE)
    if len(apart) == 1:
        said = say(
            "{value}, given to {operator} as {name}, differs{how}",
            value=known or say("a value from elsewhere"),
            operator=op.said,
            name=name,
            how=how,
        )
    else:
        said = say(
            "{count} values, given to {operator} as {name}, differ, most {value}{how}",
            count=len(apart),
            value=known or say("a value from elsewhere"),
            operator=op.said,
            name=name,
            how=how,
        )
    short = rounded.by(v, w)
    if short is not None and known is not None and not known.startswith(_COMPUTED):
        side, format_ = short
        said += say(
            "; on the {side} alone, what it holds are {format} numbers",
            format=format_,
            side=of_side(side),
        )
        return Difference("rounding_order", said, changed, CONSTANT)
    constant = known is not None and not known.startswith(_COMPUTED)
    return Difference(_cause(name, v, w, known), said, changed, CONSTANT if constant else "value")


def _is_constant(value: Value) -> bool:
    """Whether a value is a number that code has put there: a tensor without dimensions."""
    return value.shape == [] and len(value.elements or ()) == 1


def _cause(name: str, v: Value, w: Value, known: str | None) -> str:
    if known is not None and known.startswith(_BATCH):
        return meaning.of_batch(known.removeprefix(_BATCH))
    if meaning.is_mask(v) and meaning.is_mask(w):
        return "mask"
    named = meaning.of_name(name)
    if named == "weights" and known is None:
        return "unknown"  # used as one, and nobody's parameter
    return named or (meaning.of_name(known) if known else None) or "unknown"
