"""What running the suspect again showed, on either side: whether it repeats, and which is nearer.

The suspect was run in fp64 too, on what each side gave it. Where the two sides then make the same,
they compute the same function, and what each made in its own precision is judged against it:
R = error of the target / error of the benchmark, as for whole runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlprobe.judge.floors import R_LIMIT
from rlprobe.refine.trace import Again
from rlprobe.said import NOTHING_SAID, Said, of_side, say

#: fp64 of one function differs by so little of what the sides differ by.
_SAME = 0.05
#: Errors below this are the last bits of fp32.
_LEAST = 1e-7

Array = npt.NDArray[np.float64]


@dataclass
class Experiments:
    """What was learned; a class only where an experiment shows one."""

    cause: str | None = None
    statement: Said = NOTHING_SAID
    evidence: list[Said] = field(default_factory=list)
    #: error(target) / error(benchmark) against fp64; None where it is not known.
    ratio: float | None = None


@dataclass(frozen=True)
class Side:
    """One side's run of the suspect."""

    again: Again | None
    #: What it made in the run, and in fp64, by output; None where one was not kept.
    outputs: list[Array | None]
    wide: list[Array | None]


def judge(benchmark: Side, target: Side, *, stable: bool = False) -> Experiments:
    """What the experiments on the two sides show together.

    Args:
        benchmark, target: the sides.
        stable: whether the runs of the experiments repeat the diagnosed ones bit for bit. What a
            suspect then makes otherwise the second time is no chance: it keeps something.
    """
    found = Experiments()
    _repeats(found, benchmark.again, target.again, stable)
    _nearer(found, benchmark, target)
    return found


def _repeats(
    found: Experiments, benchmark: Again | None, target: Again | None, stable: bool
) -> None:
    wrong = []
    for name, again in (("benchmark", benchmark), ("target", target)):
        if again is None:
            continue
        if again.failed:
            found.evidence.append(
                say(
                    "the {side} could not be run again: {failed}",
                    side=of_side(name),
                    failed=again.failed,
                )
            )
        if again.repeats is False and stable:
            found.evidence.append(
                say(
                    "run twice on the same inputs, the {side} makes other numbers, and in another "
                    "run it makes the same ones again: it keeps something from call to call",
                    side=of_side(name),
                )
            )
        elif again.repeats is False:
            size = NOTHING_SAID
            if again.difference is not None:
                size = say(" (they differ by {difference:.2g})", difference=again.difference)
            found.evidence.append(
                say(
                    "run twice on the same inputs and random state, the {side} makes other "
                    "numbers{size}",
                    side=of_side(name),
                    size=size,
                )
            )
            wrong.append(name)
        elif again.draws:
            found.evidence.append(
                say("the {side} draws random numbers: dropout, or noise, is on", side=of_side(name))
            )
            wrong.append(f"{name} draws")
    both = {w.split()[0] for w in wrong} == {"benchmark", "target"}
    if wrong and not both:
        found.cause, found.statement = "nondeterministic", found.evidence[-1]
    elif all(again is not None and again.repeats for again in (benchmark, target)) and not wrong:
        found.evidence.append(
            say("run forward twice on the same inputs, each side repeats its numbers exactly")
        )


def _nearer(found: Experiments, benchmark: Side, target: Side) -> None:
    for name, side in (("benchmark", benchmark), ("target", target)):
        if side.again is not None and side.again.wide_failed:
            found.evidence.append(
                say(
                    "the {side} could not be run in fp64: {failed}",
                    side=of_side(name),
                    failed=side.again.wide_failed,
                )
            )
    kept = [
        [a for a in arrays if a is not None]
        for arrays in zip(
            benchmark.outputs, target.outputs, benchmark.wide, target.wide, strict=False
        )
    ]
    whole = [four for four in kept if len(four) == 4 and len({a.shape for a in four}) == 1]
    if not whole:
        return
    # of several outputs the one that differs most: others may agree
    own_b, own_t, wide_b, wide_t = max(whole, key=lambda four: _size(four[0], four[1]))
    apart, differ = _error(own_b, own_t), _error(wide_b, wide_t)
    if not apart or not np.isfinite(apart):
        return
    if not differ <= _SAME * apart:
        found.evidence.append(
            say(
                "in fp64 the sides differ by {differ:.2g} too, as against {apart:.2g}: "
                "they compute something else, or were given it, and no rounding or kernel "
                "alone accounts for it",
                differ=differ,
                apart=apart,
            )
        )
        return
    errors = [max(_error(wide_b, own_b), _LEAST), max(_error(wide_b, own_t), _LEAST)]
    found.ratio = errors[1] / errors[0]
    said = say(
        "in fp64 both sides make the same (they differ by {differ:.2g}); against "
        "it the target is off by {target:.2g} and the benchmark by {benchmark:.2g}",
        differ=differ,
        target=errors[1],
        benchmark=errors[0],
    )
    found.evidence.append(said)
    if found.cause is None and found.ratio > R_LIMIT:
        found.cause, found.statement = "implementation", said


def _size(one: Array, other: Array) -> float:
    """Their difference, to compare outputs by: what is not finite differs most."""
    size = _error(one, other)
    return size if np.isfinite(size) else float("inf")


def _error(exact: Array, other: Array) -> float:
    size = float(np.linalg.norm(exact))
    difference = float(np.linalg.norm(other - exact))
    return difference / size if size else difference
