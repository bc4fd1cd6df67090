"""Do the trainer's curves stay together? Every metric over the steps, against what chaos makes.

Training amplifies round-off, so that two correct devices' losses and rewards part after some steps.
How far, the perturbed controls show: replays on the benchmark's device whose initial weights were
moved in the last bit (:mod:`rlprobe.capture.perturbed`). Benchmark and controls are draws of what a
correct device makes; the target's must be one more. Of each metric and step it is judged by the
interval that one more draw lies in, ::

    |target - mean| <= factor * deviation * sqrt(1 + 1 / runs)

deviation and mean being those of benchmark and controls. A few runs say little about a deviation at
one step; it changes slowly, so that of the steps around it is taken together. What the sides may
differ by because they round otherwise is allowed in any case.

Replays of the same rollouts part by chaos, which has heavy tails (a single element that flips its
sign in Adam's step moves a metric ten times as far as the steps before), and other kernels round
several times more than a last bit: :func:`measured`, by the runs that docs/diagnosis.md names. In
16 bits many elements flip in every step, and tails are lighter. Trainings that generate their own
rollouts part by sampling, anew in every step: :func:`student`, Student's quantile for all
comparisons together.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rlprobe.judge.extent import is_computed
from rlprobe.said import Said, exactly, say

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: Metric -> the trainer's step, counted from 0 -> value.
Table = Mapping[str, Mapping[int, float]]
Verdict = Literal["within", "left", "not_judged"]
WITHIN: Final = "within"
LEFT: Final = "left"
NOT_JUDGED: Final = "not_judged"

#: Why runs part: by chaos in fp32, where single elements flip and tails are heavy; by chaos in 16
#: bits, where many flip in every step; or because each generated rollouts of its own.
Parting = Literal["fine", "coarse", "sampled"]
FINE: Final = "fine"
COARSE: Final = "coarse"
SAMPLED: Final = "sampled"
#: How many deviations one draw may lie off, by the degrees of freedom behind each deviation.
Factor = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
#: Of chaos: with many controls, and what is added for few of them, over their number.
_CHAOS: dict[Parting, tuple[float, float]] = {FINE: (25.0, 150.0), COARSE: (10.0, 45.0)}
#: Perturbed controls, without which nothing is judged.
LEAST = 2
#: Of all comparisons of trainings that generate their own rollouts together.
_FALSE_ALARMS = 0.01
#: Steps on either side whose deviations are taken together with a step's own.
_AROUND = 2
#: What a schedule or a setting says is the same number on both sides.
SET = re.compile(r"(^|[/_])(lr|learning_rate|coef|coeff|beta|epoch|global_step|step)$")
#: Of numbers that are set, and of no devices' arithmetic: a few roundings of fp32.
PRINTED = 1e-6
#: Shares of tokens or sequences, which change by whole ones.
SHARE = re.compile(r"frac|_ratio$|clip_ratio|aborted")
#: So many single tokens may fall on the other side of a bound.
FEW = 4.0


class Curve(msgspec.Struct, frozen=True):
    """One metric over the steps."""

    metric: str
    verdict: Verdict
    #: Where it left, counted from 0; None where it did not.
    step: int | None = None
    #: Steps that were looked at.
    steps: int = 0
    #: Where it left, or came nearest to that: its values, their difference from the mean of
    #: benchmark and controls, and what that may be. ``at`` is the step.
    at: int | None = None
    benchmark: float | None = None
    target: float | None = None
    difference: float | None = None
    allowed: float | None = None
    #: Why it is not judged, or left without a number.
    why: str = ""
    #: Step, and the lowest and highest value that it may have there.
    band: list[tuple[int, float, float]] = []
    #: What it is held against: perturbed controls, or the records of a judged step that it is made
    #: of (:mod:`rlprobe.judge.metrics`).
    by: Literal["controls", "records"] = "controls"


class Rounding(msgspec.Struct, frozen=True):
    """What metrics may differ by where weights do not."""

    #: Relative to the larger of the metric and 1, the order of what is averaged; where the controls
    #: show no spread.
    relative: float = PRINTED
    #: Response tokens of a step; None where unknown.
    tokens: int | None = None


NO_CONTROL = say("controls.perturbed was not run")
JOINED = say("each step began from the benchmark's state, so that these are no curves of its own")
ONE_SIDE = say("on one side only")
NO_SPREAD = say("a share of single tokens, of which the controls show no spread")
NONFINITE = say("not finite on the benchmark or a control")


def table_of(run: Run) -> dict[str, dict[int, float]]:
    """A run's metrics that are of what was computed.

    Raises:
        StoreError: they are damaged.
    """
    return of_lines(run.metrics())


def of_lines(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Metrics by name and step, of ``metrics.jsonl``'s lines."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        values, step = line.get("metrics"), line.get("step")
        if not isinstance(values, dict) or not isinstance(step, int):
            continue
        for name, value in values.items():
            if isinstance(value, int | float) and is_computed(str(name)):
                found.setdefault(str(name), {})[step] = float(value)
    return found


def computed(table: Table) -> Table:
    """Metrics without those of how long something took."""
    return {name: values for name, values in table.items() if is_computed(name)}


def judge(
    benchmark: Table,
    target: Table,
    controls: Sequence[Table],
    rounding: Rounding,
    parting: Parting,
) -> list[Curve]:
    """A verdict on every metric of either side, in the order of names.

    Args:
        benchmark: its metrics.
        target: the same of the target.
        controls: of the perturbed controls; fewer than two judge nothing.
        rounding: what is allowed whatever the controls show.
        parting: why the runs part.
    """
    names = sorted(benchmark.keys() | target.keys())
    comparisons = sum(len(steps) for steps in benchmark.values())
    if parting == SAMPLED:
        factor: Factor = functools.partial(student, comparisons=comparisons)
    else:
        factor = functools.partial(measured, parting, len(controls))
    return [_curve(name, benchmark, target, controls, rounding, factor) for name in names]


def unjudged(benchmark: Table, target: Table, why: str) -> list[Curve]:
    """Every metric of either side, none of which can be judged for one reason."""
    names = sorted(benchmark.keys() | target.keys())
    return [
        Curve(
            name,
            NOT_JUDGED,
            steps=len(benchmark.get(name, {}).keys() | target.get(name, {}).keys()),
            why=why,
        )
        for name in names
    ]


def _curve(
    name: str,
    benchmark: Table,
    target: Table,
    controls: Sequence[Table],
    rounding: Rounding,
    factor: Factor,
) -> Curve:
    b, t = benchmark.get(name), target.get(name)
    if not b or not t:
        return Curve(name, NOT_JUDGED, why=ONE_SIDE)
    every = sorted(b.keys() | t.keys())
    if len(controls) < LEAST:
        return Curve(name, NOT_JUDGED, steps=len(every), why=NO_CONTROL)
    known = [control.get(name, {}) for control in controls]
    steps = [step for step in every if step in b and all(step in one for one in known)]
    # a step that the benchmark and its controls reached and the target did not is no agreement
    lost = next((step for step in steps if step not in t), None)
    if not steps:
        return Curve(name, NOT_JUDGED, steps=len(every), why=NO_CONTROL)
    drawn = np.array([[one[step] for step in steps] for one in (b, *known)])
    finite = np.isfinite(drawn).all(axis=0)
    if not finite.any():
        return Curve(name, NOT_JUDGED, steps=len(steps), why=NONFINITE)
    steps = [step for step, good in zip(steps, finite, strict=True) if good and step in t]
    if not steps:
        return Curve(name, LEFT, lost, 0, why=say("no value on the target"))
    drawn = np.array([[one[step] for step in steps] for one in (b, *known)])
    mine = np.array([t[step] for step in steps])
    spread, freedom = deviation(drawn)
    widest = factor(freedom) * spread * math.sqrt(1 + 1 / len(drawn))
    return _judged(name, steps, drawn, mine, widest, lost, rounding)


def _judged(
    name: str,
    steps: list[int],
    drawn: npt.NDArray[np.float64],
    mine: npt.NDArray[np.float64],
    widest: npt.NDArray[np.float64],
    lost: int | None,
    rounding: Rounding,
) -> Curve:
    allowed = np.maximum(widest, _floor(name, drawn, mine, widest, rounding))
    difference = np.abs(mine - drawn.mean(axis=0))
    ratio = np.where(np.isfinite(difference), difference / allowed, np.inf)
    beyond = np.flatnonzero(ratio > 1)
    if beyond.size and not widest.any() and SHARE.search(name) and rounding.tokens is None:
        return Curve(name, NOT_JUDGED, steps=len(steps), why=NO_SPREAD)
    mean = drawn.mean(axis=0)
    band = [
        (step, float(m - most), float(m + most))
        for step, m, most in zip(steps, mean, allowed, strict=True)
    ]
    at = int(beyond[0]) if beyond.size else int(ratio.argmax())
    left = steps[at] if beyond.size else None
    if lost is not None and (left is None or lost < left):
        return Curve(
            name, LEFT, lost, len(steps), lost, why=say("no value on the target"), band=band
        )
    return Curve(
        name, LEFT if left is not None else WITHIN, left, len(steps), steps[at],
        float(drawn[0, at]), _plain(mine[at]), _plain(difference[at]), float(allowed[at]),
        "" if math.isfinite(mine[at]) else say("not finite on the target"), band,
    )  # fmt: skip


def _plain(value: np.floating[Any]) -> float | None:
    return float(value) if np.isfinite(value) else None


def _floor(
    name: str,
    drawn: npt.NDArray[np.float64],
    mine: npt.NDArray[np.float64],
    widest: npt.NDArray[np.float64],
    rounding: Rounding,
) -> npt.NDArray[np.float64]:
    """What is allowed whatever the spread; all of a step's round-off where the controls show none.

    A device may compute one thing by two kernels that the benchmark computes by one (a ratio that
    is 1 there), which no disturbance of its weights shows.
    """
    size: npt.NDArray[np.float64] = np.maximum(
        np.abs(drawn).max(axis=0), np.nan_to_num(np.abs(mine), posinf=0.0)
    )
    if SET.search(name):
        return np.asarray(PRINTED * size + np.finfo(np.float64).tiny)
    unseen = np.where(widest > 0, PRINTED, rounding.relative)
    floor = unseen * np.maximum(size, 1.0)
    if rounding.tokens and SHARE.search(name):
        floor = np.maximum(floor, FEW / rounding.tokens)
    return np.asarray(floor)


def deviation(
    drawn: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Standard deviation of one draw at each step, and the degrees of freedom behind it.

    Args:
        drawn: [runs, steps] values of benchmark and controls.
    """
    runs, count = drawn.shape
    variance = drawn.var(axis=0, ddof=1)
    spread, freedom = np.empty(count), np.empty(count)
    for step in range(count):
        near = slice(max(0, step - _AROUND), step + _AROUND + 1)
        spread[step] = math.sqrt(float(np.mean(variance[near])))
        freedom[step] = (runs - 1) * len(variance[near])
    return spread, freedom


def of_precision(precision: str) -> Parting:
    """How replays part that compute in a precision."""
    return COARSE if precision in ("bf16", "fp16") else FINE


def measured(
    parting: Parting, controls: int, freedom: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """How many deviations one more replay may lie from the mean.

    Args:
        parting: :data:`FINE` or :data:`COARSE`.
        controls: how many perturbed controls there are.
        freedom: of each deviation; the factor does not follow from it.
    """
    least, few = _CHAOS[parting]
    return np.full(freedom.shape, least + few / controls)


def student(freedom: npt.NDArray[np.float64], comparisons: int) -> npt.NDArray[np.float64]:
    """How many deviations one more draw exceeds once in a hundred alignments, by chance.

    Args:
        freedom: degrees of freedom behind each deviation.
        comparisons: metrics times steps, all of which are looked at.
    """
    tail = 0.5 * _FALSE_ALARMS / max(comparisons, 1)
    known = {float(each): _quantile(float(each), tail) for each in np.unique(freedom)}
    return np.array([known[float(each)] for each in freedom])


def _quantile(freedom: float, tail: float) -> float:
    """Student's t that is exceeded with probability ``tail``.

    With t = sqrt(freedom) tan(a) its density is that of cos(a) ** (freedom - 1), which is summed up
    from the far end.
    """
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    beyond = np.cumsum(density[::-1])[::-1]
    share = 0.5 * beyond / beyond[0]
    at = int(np.searchsorted(-share, -tail))
    return math.sqrt(freedom) * math.tan(angles[min(at, len(angles) - 2)])


def ratio(curve: Curve) -> float:
    """A curve's difference in multiples of what it may be; infinite where it is no number."""
    if curve.difference is None or not curve.allowed:
        return math.inf
    return curve.difference / curve.allowed


def said(curve: Curve) -> Said:
    """By how much a metric left, in words."""
    if curve.difference is None or curve.allowed is None:
        why = curve.why or say("no number to compare")
        return why if isinstance(why, Said) else exactly(why)
    if curve.by == "records":
        return say(
            "{target:.6g} against {benchmark:.6g} on the benchmark, {difference:.2g} apart where "
            "what it is made of allows {allowed:.2g} ({ratio:.3g} times)",
            target=curve.target,
            benchmark=curve.benchmark,
            difference=curve.difference,
            allowed=curve.allowed,
            ratio=ratio(curve),
        )
    return say(
        "{target:.6g} against {benchmark:.6g} on the benchmark, {difference:.2g} from the mean of "
        "benchmark and controls where {allowed:.2g} may be ({ratio:.3g} times)",
        target=curve.target,
        benchmark=curve.benchmark,
        difference=curve.difference,
        allowed=curve.allowed,
        ratio=ratio(curve),
    )
