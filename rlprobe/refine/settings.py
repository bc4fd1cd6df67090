"""What an optimizer was told otherwise on one side: learning rates, betas, epsilons, decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlprobe.refine.difference import IMPLEMENTATION, Difference, number
from rlprobe.refine.trace import Trace
from rlprobe.said import say


def differences(benchmark: Trace, target: Trace) -> list[Difference]:
    """What the optimizer was told otherwise, in the first step in which it was."""
    for step, (b, t) in enumerate(zip(benchmark.settings, target.settings, strict=False)):
        found = [
            Difference(
                "hyperparameter" if _is_constant(one.get(name), other.get(name)) else "optimizer",
                say(
                    "{name} {target} on the target instead of {benchmark} in group {group} of the "
                    "optimizer, step {number}",
                    name=name,
                    target=number(other.get(name)),
                    benchmark=number(one.get(name)),
                    group=group,
                    number=step,
                ),
                True,
                SETTING,
            )
            for group, (one, other) in enumerate(zip(b, t, strict=False))
            for name in sorted({*one, *other})
            if one.get(name) != other.get(name) and name not in _HOW
        ]
        if found:
            return found
    return []


#: Kind of a difference of an optimizer's settings.
SETTING = "setting"


def _is_constant(*values: object) -> bool:
    """Whether a setting is a number, and not a switch between ways to compute."""
    parts = [p for value in values for p in (value if isinstance(value, list) else [value])]
    return all(isinstance(p, (int, float)) and not isinstance(p, bool) for p in parts)


#: How an optimizer is run, which is no setting of what it computes.
_HOW = ("foreach", "fused", "capturable", "differentiable", "initial_lr")


def counts(benchmark: Trace, target: Trace) -> list[Difference]:
    """The steps that optimizers count, where the sides count otherwise.

    They are whole numbers that code takes off its state in the step.
    """
    sides = [_taken(trace) for trace in (benchmark, target)]
    pairs = [(b, t) for b, t in zip(*sides, strict=False) if b != t]
    if not pairs or len(sides[0]) != len(sides[1]) or len(set(pairs)) > 1:
        return []
    said = say(
        "the optimizer counts step {target:.6g} on the target and {benchmark:.6g} on the benchmark",
        target=pairs[0][1],
        benchmark=pairs[0][0],
    )
    return [Difference("optimizer", said, True, SETTING)]


def _taken(trace: Trace) -> list[float]:
    found = (
        v.elements[0]
        for op in trace.operators
        if op.name == "aten::_local_scalar_dense" and op.direction == "forward"
        for v in op.inputs
        if v.elements and v.shape == []
    )
    return [n for n in found if isinstance(n, (int, float)) and float(n).is_integer() and n > 0]


def left_out(benchmark: Trace, target: Trace) -> int | None:
    """The side (0, 1) on which the only setting that differs is 0, and that runs less for it.

    None where none is, or several are.
    """
    apart = {
        (name, not one.get(name), not other.get(name))
        for b, t in zip(benchmark.settings, target.settings, strict=False)
        for one, other in zip(b, t, strict=False)
        for name in {*one, *other}
        if one.get(name) != other.get(name) and name not in _HOW
        and _is_constant(one.get(name), other.get(name))
    }  # fmt: skip
    sides = [zero for _, *zero in apart]
    return sides[0].index(True) if len(sides) == 1 and any(sides[0]) else None


def of_another_computation(
    found: Sequence[Difference],
    beside: Sequence[Difference],
    runs: Callable[[Difference, int], bool],
    less: int | None,
) -> list[Difference]:
    """Another setting is another constant only of the same computation: else of another one.

    Args:
        found: what differs.
        beside: what one side alone does to gradients in the step: another number there, as one
            that clips nothing, is a part of it.
        runs: whether a side runs operators of a difference.
        less: the side whose setting is 0 (:func:`left_out`): what it does not run follows from
            that number.
    """
    others = [d for d in found if d.kind == "operators" and d.effective]
    if any(less is None or runs(d, less) for d in others):
        found = [replace(d, cause="optimizer") if d.kind == SETTING else d for d in found]
    return [_beside(d, beside[0]) if beside else d for d in found]


def _beside(scalar: Difference, other: Difference) -> Difference:
    if (scalar.cause, scalar.kind) != ("hyperparameter", "scalar"):
        return scalar
    said = say("{first}; besides, {other}", first=scalar.said, other=other.said)
    return replace(scalar, cause=IMPLEMENTATION, said=said)
