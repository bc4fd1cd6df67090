"""The trainer's curves of an alignment: their verdicts, and what a diagnosis says of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from rlprobe.diagnose.diagnosis import UNKNOWN, Cause, First
from rlprobe.errors import ReplayError, StoreError
from rlprobe.judge import curves, execution
from rlprobe.judge.analysis import Step
from rlprobe.judge.curves import Curve, Rounding
from rlprobe.judge.extent import TRAINER
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, REPEAT, TARGET, is_perturbed
from rlprobe.rollouts import hdf5
from rlprobe.rollouts.model import Ragged
from rlprobe.said import listed, say
from rlprobe.store.read import Run

#: Metrics named in one sentence.
_NAMED = 4


def find(results: Results, step: Step) -> list[Curve]:
    """Every metric's verdict; none where there are no runs.

    Raises:
        StoreError: a run's metrics are damaged.
    """
    benchmark, target = (results.run(role) for role in (BENCHMARK, TARGET))
    if results.of_dumps or benchmark is None or target is None:
        return []
    mine = curves.table_of(benchmark)
    if target.is_joined:
        return curves.unjudged(mine, curves.table_of(target), curves.JOINED)
    controls = [curves.table_of(run) for run in perturbed(results)]
    again = results.run(REPEAT)
    if controls and again is not None and (repeat := curves.table_of(again)) != mine:
        controls.append(repeat)  # a device that does not repeat itself is a draw of its own
    rounding = Rounding(_relative(step), _tokens(benchmark, step.number))
    parting = curves.of_precision(results.plan.runs[BENCHMARK].precision)
    return curves.judge(mine, curves.table_of(target), controls, rounding, parting)


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
        finding.stage.rows.filter(
            (pl.col("phase") == execution.FORWARD) & (pl.col("slot") == "output")
        )
        .get_column("floor")
        .max()
        for finding in step.findings.values()
    ]
    return max([Rounding().relative, *(f for f in floors if isinstance(f, float))])


def _tokens(benchmark: Run, step: int) -> int | None:
    """Response tokens of a step, as its rollouts have them."""
    path = benchmark.rollouts.get(step)
    if path is None:
        return None
    try:
        mask = hdf5.read(path).tensors.get("response_mask")
    except ReplayError:
        return None  # the gate says that they cannot be read
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
    evidence.append(
        say(
            "no record of step {step} was judged: capture it (steps.start and steps.end {step}) "
            "with controls.rejoin: true to see in which stage and module it parts",
            step=left.step,
        )
    )
    statement = say("the curves part by more than chaos does; records of that step would say where")
    return Cause(UNKNOWN, UNKNOWN, statement, evidence)
