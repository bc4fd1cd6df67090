"""The trainer's curves of an alignment: their verdicts, and what a diagnosis says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl

from rlprobe.diagnose.diagnosis import UNKNOWN, Cause, First
from rlprobe.errors import ReplayError, StoreError
from rlprobe.judge import curves, execution, metrics, outcomes
from rlprobe.judge.analysis import Step
from rlprobe.judge.curves import Curve, Rounding, Table
from rlprobe.judge.extent import TRAINER
from rlprobe.judge.inputs import Results, require
from rlprobe.judge.metrics import Reported
from rlprobe.judge.row import columns_where
from rlprobe.roles import BENCHMARK, REPEAT, TARGET, is_perturbed
from rlprobe.rollouts.model import Ragged
from rlprobe.said import listed, say
from rlprobe.store.read import Run

#: Metrics named in one sentence.
_NAMED = 4


@dataclass(frozen=True)
class Metrics:
    """What was found of the metrics that the trainer reports."""

    #: Every metric's verdict.
    curves: list[Curve] = field(default_factory=list)
    #: By judged step, the metrics that are held against the records that they are made of.
    held: dict[int, set[str]] = field(default_factory=dict)


def find(results: Results, steps: Sequence[Step]) -> Metrics:
    """Every metric's verdict; none where there are no runs.

    Args:
        results: the alignment.
        steps: those that were judged.

    Raises:
        StoreError: a run's metrics are damaged.
    """
    benchmark, target = (results.run(role) for role in (BENCHMARK, TARGET))
    if results.of_dumps or benchmark is None or target is None:
        return Metrics()
    tables = curves.table_of(benchmark), curves.table_of(target)
    found = {curve.metric: curve for curve in _of_curves(results, *tables, steps[0])}
    held = {}
    for step in steps:
        reported = _reported(results, *tables, step, benchmark)
        held[step.number] = {one.metric for one in reported}
        for one in reported:
            found[one.metric] = _with_step(found[one.metric], one, step.number)
    return Metrics(list(found.values()), held)


def _reported(
    results: Results, mine: Table, other: Table, step: Step, benchmark: Run
) -> list[Reported]:
    """A judged step's metrics of which it is known what they are made of."""
    sides = [
        {name: values[step.number] for name, values in table.items() if step.number in values}
        for table in (mine, other)
    ]
    rows = [finding.stage.rows for finding in step.findings.values()]
    return metrics.judge(
        step,
        *sides,
        gradients=outcomes.norm_floor(rows),
        tokens=_tokens(benchmark, step.number),
        precisions={results.plan.runs[role].precision for role in (BENCHMARK, TARGET)},
    )


def _with_step(curve: Curve, one: Reported, step: int) -> Curve:
    """A metric's verdict given one judged step: it may leave there, or have no other step."""
    earlier = curve.verdict == curves.LEFT and (curve.step or 0) <= step
    alone = curve.verdict == curves.NOT_JUDGED and curve.steps <= 1
    if earlier or not (one.differs or alone):
        return curve
    sides = (one.benchmark, one.target)
    difference = abs(one.target - one.benchmark)
    finite = math.isfinite(difference)
    return Curve(
        metric=one.metric,
        verdict=curves.LEFT if one.differs else curves.WITHIN,
        step=step if one.differs else None,
        steps=max(curve.steps, 1),
        at=step,
        benchmark=sides[0] if math.isfinite(sides[0]) else None,
        target=sides[1] if math.isfinite(sides[1]) else None,
        difference=difference if finite else None,
        allowed=one.allowed,
        why="" if finite else say("finite on one side only"),
        band=(
            [(step, sides[0] - one.allowed, sides[0] + one.allowed)]
            if finite and one.allowed is not None
            else []
        ),
        by="records",
    )


def _of_curves(results: Results, mine: Table, other: Table, step: Step) -> list[Curve]:
    benchmark, target = require(results, BENCHMARK), require(results, TARGET)
    if target.is_joined:
        return curves.unjudged(mine, other, curves.JOINED)
    controls = [curves.table_of(run) for run in perturbed(results)]
    again = results.run(REPEAT)
    if controls and again is not None and (repeat := curves.table_of(again)) != mine:
        controls.append(repeat)  # a device that does not repeat itself is a draw of its own
    rounding = Rounding(_relative(step), _tokens(benchmark, step.number))
    parting = curves.of_precision(results.plan.runs[BENCHMARK].precision)
    return curves.judge(mine, other, controls, rounding, parting)


def perturbed(results: Results) -> list[Run]:
    """The perturbed controls that are in the store.

    Raises:
        StoreError: one of them is damaged, or no replay of this benchmark.
    """
    origin = results.plan.runs.get(BENCHMARK)
    roles = sorted(filter(is_perturbed, results.plan.runs))
    found = [run for role in roles if (run := results.run(role)) is not None]
    for run in found:
        if origin is not None and origin.key not in run.manifest.parents:
            raise StoreError(
                f"controls.perturbed: run {run.key[:12]} is no replay of the benchmark "
                f"{origin.key[:12]}, so it says nothing about how far its curves may part; give "
                "the keys of its own perturbed controls"
            )
    return found


def _relative(step: Step) -> float:
    """The deepest floor of anything that the judged step computed forward."""
    floors = [
        columns_where(
            finding.stage.rows,
            (pl.col("phase") == execution.FORWARD) & (pl.col("slot") == "output"),
            "floor",
        )
        .get_column("floor")
        .max()
        for finding in step.findings.values()
    ]
    return max([Rounding().relative, *(f for f in floors if isinstance(f, float))])


def _tokens(benchmark: Run, step: int) -> int | None:
    """Response tokens of a step, as its rollouts have them."""
    try:
        found = benchmark.generated(step)
    except ReplayError:
        return None  # the gate says that they cannot be read
    mask = None if found is None else found.tensors.get("response_mask")
    if mask is None:
        return None
    values = mask.values if isinstance(mask, Ragged) else mask
    return int(np.asarray(values).sum()) or None


def left(found: Sequence[Curve]) -> Curve | None:
    """The metric that leaves first; of several at one step the one that is furthest out."""
    gone = [curve for curve in found if curve.verdict == curves.LEFT]
    return min(gone, key=lambda curve: (curve.step or 0, -curves.ratio(curve)), default=None)


def first(curve: Curve) -> First:
    """A metric as the first divergence: no stage's record, but the trainer's number."""
    sides = [
        {"record": curve.metric, **({} if value is None else {"value": value})}
        for value in (curve.benchmark, curve.target)
    ]
    return First(
        TRAINER, curve.step or 0, 0, None, None, curve.metric, None, None, sides[0], sides[1]
    )


def cause(found: Sequence[Curve], left: Curve) -> Cause:
    """What is known of it: that it is no chaos, and which curves follow."""
    gone = [curve for curve in found if curve.verdict == curves.LEFT]
    held = [curve for curve in found if curve.verdict == curves.WITHIN]
    others = sorted(
        (c for c in gone if c is not left), key=lambda c: (c.step or 0, -curves.ratio(c))
    )
    metrics = say("1 metric") if len(gone) == 1 else say("{count} metrics", count=len(gone))
    evidence: list[str] = [
        say(
            "{metric}, step {step}: {said}",
            metric=left.metric,
            step=left.step,
            said=curves.said(left),
        ),
        say(
            "{metrics} left, {held} stayed within what the controls show",
            metrics=metrics,
            held=len(held),
        ),
    ]
    if others:
        named = listed(
            (say("{metric} at step {step}", metric=c.metric, step=c.step) for c in others), _NAMED
        )
        evidence.append(say("after it: {metrics}", metrics=named))
    if left.by == "records":
        evidence.append(
            say(
                "the records and key data of that step that it is made of agree: it was computed "
                "of them, or collected, otherwise"
            )
        )
        return Cause(UNKNOWN, UNKNOWN, say("the trainer reports another number"), evidence)
    evidence.append(
        say(
            "no record of step {step} was judged: capture it (steps.start and steps.end {step}) "
            "with controls.rejoin: true to see in which stage and module it parts",
            step=left.step,
        )
    )
    statement = say("the curves part by more than chaos does; records of that step would say where")
    return Cause(UNKNOWN, UNKNOWN, statement, evidence)
