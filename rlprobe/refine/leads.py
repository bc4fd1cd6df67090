"""What numbers are, by what they lead to: angles of a rotation, or scores of attention.

An operator's name says what is done to numbers, and not what they are. A factor, a bound or a shift
of what nothing but cosines and sines are made of are other positions. A truth value that no score
is hidden by says nothing of who attends to whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rlprobe.refine import meaning
from rlprobe.refine.difference import IMPLEMENTATION, Difference
from rlprobe.refine.pairing import Apart, Both
from rlprobe.refine.trace import Operator, Trace

#: How positions and frequencies become angles.
_TO_ANGLES = frozenset({
    "mul", "bmm", "mm", "matmul", "outer", "add", "sub", "rsub", "div", "neg", "pow", "reciprocal",
    "true_divide", "exp",
}) | meaning.VIEWS | meaning.MOVES | meaning.CASTS  # fmt: skip
_TURNS = frozenset({"cos", "sin", "polar"})
#: Classes of what is done to numbers, whichever these are.
_OF_NUMBERS = (
    "constant_factor", "saturation", "layout", "hyperparameter", "label_or_mask_shift",
    IMPLEMENTATION,
)  # fmt: skip
#: Kinds of differences that are of an operator's own doing.
_DONE = ("operators", "scalar", "moves")
#: Parts of the names of operators that make weights of scores.
_ATTEND = ("softmax", "attention", "attn", "sdp", "flash", "exp")


def told(
    found: Sequence[Difference], steps: Sequence[Both | Apart], target: Trace
) -> list[Difference]:
    """Differences, each as what it is of where that shows in what it leads to.

    Args:
        found: in the order of what ran.
        steps: the operators of both sides.
        target: its trace.
    """
    return [_told(d, steps, target) for d in found]


def _told(difference: Difference, steps: Sequence[Both | Apart], target: Trace) -> Difference:
    at, of_module = difference.at, target.kind == "module"
    if at is None or not of_module or difference.kind not in _DONE:
        return difference
    ran = steps[at].target
    own = [ran] if isinstance(ran, Operator) else ran
    if not own or any(op.direction != "forward" for op in own):
        return difference
    if difference.cause in _OF_NUMBERS and _are_angles(own, target):
        return replace(difference, cause="position")
    if difference.cause == "mask" and not _attends(own, target):
        return replace(difference, cause=IMPLEMENTATION)
    return difference


def _users(own: Iterable[Operator], target: Trace) -> Iterable[tuple[Operator, set[int]]]:
    """Forward operators behind some, given what these lead to; the caller adds to it."""
    mine = list(own)
    follows = {v.value for op in mine for v in op.outputs}
    ran = {op.n for op in mine}
    for op in target.operators:
        later = op.n > mine[0].n and op.n not in ran and op.direction == "forward"
        if later and follows & {v.value for v in op.inputs}:
            yield op, follows


def _are_angles(own: Sequence[Operator], target: Trace) -> bool:
    """Whether cosines and sines are all that what operators make is used for."""
    turned = False
    for op, follows in _users(own, target):
        kind = meaning.plain(op)
        if kind in _TURNS:
            turned = True
        elif kind in _TO_ANGLES:
            follows |= {v.value for v in op.outputs}
        elif not op.name.startswith("module::"):
            return False
        if {v.value for v in target.outputs} & follows:
            return False
    return turned


def _attends(own: Sequence[Operator], target: Trace) -> bool:
    """Whether what operators make may hide scores: it is handed out, or weights are made of it."""
    handed = {v.value for v in target.outputs}
    for op, follows in _users(own, target):
        kind = meaning.plain(op)
        if op.name.startswith("module::"):
            continue  # what it runs is seen by itself
        if not op.name.startswith("aten::") or any(word in kind for word in _ATTEND):
            return True
        if kind not in _COMPUTE:
            follows |= {v.value for v in op.outputs}
    made = {v.value for op in own for v in op.outputs}
    return bool(handed & made)


#: What makes features of features: behind it stands no mask, and no score that one hides.
_COMPUTE = frozenset({
    "mm", "bmm", "addmm", "matmul", "linear", "pow", "native_layer_norm", "rms_norm", "silu",
    "gelu", "mean", "convolution", "embedding",
})  # fmt: skip
