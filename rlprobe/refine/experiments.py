"""What running the suspect again showed, on either side: whether it repeats, and which is nearer.

The suspect was run in fp64 too, on what each side gave it. Where the two sides then make the same,
they compute the same function, and what each made in its own precision is judged against it:
R = error of the target / error of the benchmark, as for whole runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlprobe.judge.floors import R_LIMIT
from rlprobe.judge.roundoff import UNIT
from rlprobe.refine import reach
from rlprobe.refine.trace import Again, AgainBackward
from rlprobe.said import NOTHING_SAID, Said, listed, of_side, say

#: fp64 of one function differs by so little of what the sides differ by.
_SAME = 0.05
#: What a suspect may make of its inputs' difference, and the share of the whole that this may be.
_INHERITED, _MOST_INHERITED = 4.0, 0.25
#: Errors below this are the last bits of fp32.
_LEAST = 1e-7
#: Unit round-offs of a shorter format by which results may be off that went through it.
_ROUNDINGS = 8.0
#: Share of the sides' difference that chance must make to be its cause.
_OF_CHANCE = 0.1
#: Gradients of one sentence that are named.
_NAMED = 4
IN_FORWARD, IN_BACKWARD = say("forward"), say("backward")

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
    #: The same of its backward pass; gradients by name.
    back: AgainBackward | None = None
    made: Mapping[str, Array] = field(default_factory=dict)
    back_wide: Mapping[str, Array] = field(default_factory=dict)
    #: Which tokens depend on which (:mod:`rlprobe.refine.reach`).
    reach: Array | None = None
    #: Formats of what its operators made.
    formats: frozenset[str] = frozenset()
    #: Places of outputs that are whole numbers or truth values: what was decided, not computed.
    decisions: frozenset[int] = frozenset()


def judge(
    benchmark: Side,
    target: Side,
    floor: float = 0.0,
    *,
    given: float = 0.0,
    stable: bool = False,
    backward: bool = False,
) -> Experiments:
    """What the experiments on the two sides show together.

    Args:
        benchmark, target: the sides.
        floor: relative difference of results that agree.
        given: largest relative difference of what the sides' suspects were given.
        stable: whether the runs of the experiments repeat the diagnosed ones bit for bit. What a
            suspect then makes otherwise the second time is no chance: it keeps something.
        backward: whether it is the backward pass in which the sides part.
    """
    found = Experiments()
    _repeats(found, benchmark, target, stable)
    _widened(found, benchmark, target)
    if backward:
        near = _nearer(found, _gradients(benchmark, target), IN_BACKWARD, given)
    else:
        near = _nearer(found, _outputs(benchmark, target), IN_FORWARD, given)
        _reaches(found, benchmark, target, floor)
    if near is not None:
        found.ratio = near.ratio
        if found.cause is None and near.ratio > R_LIMIT:
            _less_exact(found, near, _shorter(benchmark, target))
    return found


def _less_exact(found: Experiments, near: _Nearness, shorter: list[str]) -> None:
    """The target computes the same less exactly: in shorter formats, or by another kernel."""
    found.cause, found.statement = "implementation", near.said
    unit = max((UNIT[name] for name in shorter), default=0.0)
    if near.off <= _ROUNDINGS * unit:
        found.cause = "rounding_order"
        found.statement = say(
            "the target's operators work on {formats}, the benchmark's do not; {said}",
            formats=listed([f.removeprefix("torch.") for f in shorter], _NAMED),
            said=near.said,
        )


def _shorter(benchmark: Side, target: Side) -> list[str]:
    """Formats that the target alone works on and that round more than the benchmark's."""
    coarsest = max((UNIT.get(name, 0.0) for name in benchmark.formats), default=1.0)
    return sorted(name for name in target.formats if UNIT.get(name, 0.0) > coarsest)


def _reaches(found: Experiments, benchmark: Side, target: Side, floor: float) -> None:
    """Whether tokens attend to others on one side alone."""
    own, other = (side.outputs[0] if side.outputs else None for side in (benchmark, target))
    if benchmark.reach is None or target.reach is None or own is None or other is None:
        return
    reached = reach.judge(benchmark.reach, target.reach, (own, other), floor)
    if reached is None:
        return
    found.evidence.append(reached.said)
    if reached.accounts and found.cause is None:
        found.cause, found.statement = "mask", reached.said


def _repeats(found: Experiments, benchmark: Side, target: Side, stable: bool) -> None:
    wrong: list[tuple[str, Said]] = []
    sizes = (
        _largest(_pairs(benchmark.outputs, target.outputs)),
        _largest(_shared(benchmark.made, target.made)),
    )
    for name, side in (("benchmark", benchmark), ("target", target)):
        _say_failed(found, name, side)
        said, chance = _not_repeated(name, side, stable, sizes)
        found.evidence += said
        wrong += [(name, said[-1])] if chance else []
    sides = {name for name, _ in wrong}
    if len(sides) == 1:
        found.cause, found.statement = "nondeterministic", wrong[-1][1]
    elif not wrong:
        _say_repeated(found, benchmark, target)


def _say_repeated(found: Experiments, benchmark: Side, target: Side) -> None:
    forward = [side.again is not None and side.again.repeats for side in (benchmark, target)]
    back = [side.back is not None and side.back.repeats for side in (benchmark, target)]
    if all(forward) and all(back):
        found.evidence.append(
            say(
                "run forward and backward twice on the same inputs, each side repeats its numbers "
                "exactly"
            )
        )
    elif all(forward):
        found.evidence.append(
            say("run forward twice on the same inputs, each side repeats its numbers exactly")
        )


_Pair = tuple[Array, Array]


def _pairs(one: Sequence[Array | None], other: Sequence[Array | None]) -> list[_Pair]:
    both = zip(one, other, strict=False)
    return [(a, b) for a, b in both if a is not None and b is not None and a.shape == b.shape]


def _shared(one: Mapping[str, Array], other: Mapping[str, Array]) -> list[_Pair]:
    names = [name for name in one if name in other]
    return _pairs([one[n] for n in names], [other[n] for n in names])


def _largest(pairs: list[_Pair]) -> float | None:
    """By how much the two sides' results differ; None where none are kept."""
    return max((_size(a, b) for a, b in pairs), default=None)


def _say_failed(found: Experiments, name: str, side: Side) -> None:
    for run, way in ((side.again, IN_FORWARD), (side.back, IN_BACKWARD)):
        if run is not None and run.failed:
            found.evidence.append(
                say(
                    "the {side} could not be run again {way}: {failed}",
                    side=of_side(name),
                    way=way,
                    failed=run.failed,
                )
            )


def _not_repeated(
    name: str, side: Side, stable: bool, sizes: tuple[float | None, float | None]
) -> tuple[list[Said], bool]:
    """What a side made otherwise the second time, in words, and whether chance is the cause.

    It is where it makes as much of a difference as the two sides have: last bits that are others
    each time explain no more than last bits.
    """
    found: list[Said] = []
    causes: list[Said] = []
    for run, size in zip((side.again, side.back), sizes, strict=True):
        if run is None or not (run.repeats is False or run.draws):
            continue
        if run.repeats is False and stable:
            return [_kept(name)], False
        said = _random(name, run)
        found.append(said)
        if run.draws or _explains(run.difference, size):
            causes.append(said)
    # the last one is what is said of the cause
    return [*(said for said in found if said not in causes), *causes], bool(causes)


def _explains(difference: float | None, size: float | None) -> bool:
    return difference is None or size is None or difference >= _OF_CHANCE * size


def _random(name: str, run: Again | AgainBackward) -> Said:
    whose = of_side(name)
    if isinstance(run, AgainBackward):
        if run.repeats is False:
            return say(
                "run backward twice on the same inputs, gradient and random state, the {side} "
                "makes other gradients of {names}{size}",
                side=whose,
                names=listed(run.differs, _NAMED),
                size=_by(run.difference),
            )
        return say("the {side} draws random numbers in its backward pass", side=whose)
    if run.repeats is False:
        return say(
            "run twice on the same inputs and random state, the {side} makes other numbers{size}",
            side=whose,
            size=_by(run.difference),
        )
    return say("the {side} draws random numbers: dropout, or noise, is on", side=whose)


def _kept(name: str) -> Said:
    return say(
        "run twice on the same inputs, the {side} makes other numbers, and in another "
        "run it makes the same ones again: it keeps something from call to call",
        side=of_side(name),
    )


def _by(difference: float | None) -> Said:
    if difference is None:
        return NOTHING_SAID
    return say(" (they differ by {difference:.2g})", difference=difference)


def _widened(found: Experiments, benchmark: Side, target: Side) -> None:
    """Say which side could not be run in fp64."""
    for name, side in (("benchmark", benchmark), ("target", target)):
        for run, way in ((side.again, IN_FORWARD), (side.back, IN_BACKWARD)):
            if run is not None and run.wide_failed:
                found.evidence.append(
                    say(
                        "the {side} could not be run in fp64 {way}: {failed}",
                        side=of_side(name),
                        way=way,
                        failed=run.wide_failed,
                    )
                )


#: What one output or gradient is: the benchmark's, the target's, and both in fp64.
_Four = tuple[Array, Array, Array, Array]


def _outputs(benchmark: Side, target: Side) -> list[_Four]:
    every = zip(benchmark.outputs, target.outputs, benchmark.wide, target.wide, strict=False)
    # a choice has no round-off of its own: one that tips differs by what is chosen
    return [
        (a, b, c, d)
        for place, (a, b, c, d) in enumerate(every)
        if place not in benchmark.decisions | target.decisions
        and a is not None and b is not None and c is not None and d is not None
    ]  # fmt: skip


def _gradients(benchmark: Side, target: Side) -> list[_Four]:
    held = (benchmark.made, target.made, benchmark.back_wide, target.back_wide)
    names = [name for name in held[0] if all(name in each for each in held)]
    return [(held[0][n], held[1][n], held[2][n], held[3][n]) for n in names]


@dataclass(frozen=True)
class _Nearness:
    """How far the sides are from what both make in fp64: R, the target's error, and in words."""

    ratio: float
    off: float
    said: Said


def _nearer(found: Experiments, kept: list[_Four], way: Said, given: float) -> _Nearness | None:
    """Which side is nearer to fp64; None where that is not known, or they do not agree there."""
    whole = [four for four in kept if len({a.shape for a in four}) == 1]
    if not whole:
        return None
    # of several outputs the one that differs most: others may agree
    own_b, own_t, wide_b, wide_t = max(whole, key=lambda four: _size(four[0], four[1]))
    apart, differ = _error(own_b, own_t), _error(wide_b, wide_t)
    if not apart or not np.isfinite(apart):
        return None
    if not np.isfinite(differ):
        found.evidence.append(
            say("{way}, in fp64, a side makes numbers that are not finite: nothing is known of it",
                way=way)
        )  # fmt: skip
        return None
    # in fp64 too they differ by what comes in with their inputs
    inherited = min(_INHERITED * given, _MOST_INHERITED * apart)
    if not differ <= max(_SAME * apart, inherited):
        found.evidence.append(
            say(
                "{way}, in fp64, the sides differ by {differ:.2g} too, as against {apart:.2g}: "
                "they compute something else, were given it, or round by other means than formats",
                way=way,
                differ=differ,
                apart=apart,
            )
        )
        return None
    errors = [max(_error(wide_b, own_b), _LEAST), max(_error(wide_b, own_t), _LEAST)]
    said = say(
        "{way}, in fp64, both sides make the same (they differ by {differ:.2g}); against "
        "it the target is off by {target:.2g} and the benchmark by {benchmark:.2g}",
        way=way,
        differ=differ,
        target=errors[1],
        benchmark=errors[0],
    )
    found.evidence.append(said)
    return _Nearness(errors[1] / errors[0], errors[1], said)


def _size(one: Array, other: Array) -> float:
    """Their difference, to compare outputs by: what is not finite differs most."""
    size = _error(one, other)
    return size if np.isfinite(size) else float("inf")


def _error(exact: Array, other: Array) -> float:
    size = float(np.linalg.norm(exact))
    difference = float(np.linalg.norm(other - exact))
    return difference / size if size else difference
