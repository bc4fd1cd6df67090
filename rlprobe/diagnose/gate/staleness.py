"""Weights over the captured steps: an update that never arrived, a frozen model that moved.

Later steps show no first divergence by their numbers, because weights differ by inheritance. But
*whether* a model's weights changed from one step to the next is the same question on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, opened, shut
from rlprobe.said import Said, say
from rlprobe.store.read import Run

ITEM = "weights over steps"


@dataclass(frozen=True)
class Stale:
    """The first stage whose weights changed on one side only."""

    stage: str
    step: int
    rank: int
    parameter: str
    #: Parameters that changed on the benchmark, and on the target.
    benchmark: int
    target: int

    @property
    def said(self) -> Said:
        """Evidence in a sentence."""
        if self.benchmark:
            return say(
                "on entering {stage} in step {step}, {benchmark} parameters of the "
                "benchmark differ from the captured step before and {target} of the "
                "target's: it computes with old weights (such as {parameter})",
                stage=self.stage,
                step=self.step,
                benchmark=self.benchmark,
                target=self.target,
                parameter=self.parameter,
            )
        return say(
            "on entering {stage} in step {step}, {target} parameters of the target "
            "differ from the captured step before and none of the benchmark's, which "
            "is frozen (such as {parameter})",
            stage=self.stage,
            step=self.step,
            target=self.target,
            parameter=self.parameter,
        )


def check(evidence: Evidence) -> tuple[GateItem | None, Shut | None]:
    """Item ``weights over steps``; None where a side captured a single step, or was joined.

    A joined run has the benchmark's weights at each step, whatever its own updates did.

    Raises:
        StoreError: a table of weights is damaged.
    """
    if evidence.target.is_joined:
        return None, None
    steps = [
        set() if table is None else set(table.get_column("step").to_list())
        for table in (run.weights() for run in (evidence.benchmark, evidence.target))
    ]
    if len(steps[0] & steps[1]) < 2:
        return None, None
    stale = find(evidence.benchmark, evidence.target)
    if stale is None:
        return opened(ITEM, say("each model's weights move, or stay, on both sides alike")), None
    return shut(
        ITEM,
        stale.said,
        say(
            "see whether the update of weights reached this model (loading, "
            "synchronising, freezing)"
        ),
    ), Shut(
        "stale_weights",
        "weights",
        stale.stage,
        stale.rank,
        None,
        None,
        {"parameter": stale.parameter, "parameters changed": stale.benchmark},
        {"parameter": stale.parameter, "parameters changed": stale.target},
        [stale.said],
        stale.step,
    )


def find(benchmark: Run, target: Run) -> Stale | None:
    """The first such stage, by step and the order of a step; None where both sides agree.

    Raises:
        StoreError: a table of weights is damaged.
    """
    sides = [_changed(run) for run in (benchmark, target)]
    if sides[0] is None or sides[1] is None:
        return None
    both = sides[0].join(sides[1], on=["step", "stage", "role", "rank", "name"], suffix="_target")
    order = pl.col("stage").replace_strict(
        list(stages.STAGES), list(range(len(stages.STAGES))), default=99, return_dtype=pl.Int64
    )
    entered = both.group_by("step", "stage", "rank", maintain_order=True).agg(
        benchmark=pl.col("changed").sum(),
        target=pl.col("changed_target").sum(),
        parameter=pl.col("name").filter(pl.col("changed") != pl.col("changed_target")).first(),
        place=order.first(),
    )
    # One side moved and the other stood still: a few parameters without gradient are no sign.
    wrong = entered.filter((pl.col("benchmark") == 0) != (pl.col("target") == 0))
    if wrong.is_empty():
        return None
    row = wrong.sort("step", "place", "rank").row(0, named=True)
    return Stale(
        row["stage"], row["step"], row["rank"], row["parameter"], row["benchmark"], row["target"]
    )


def _changed(run: Run) -> pl.DataFrame | None:
    """Whether each parameter differs from its last reading before, at each stage and step."""
    table = run.weights()
    if table is None:
        return None
    key = ["stage", "role", "rank", "name"]
    return (
        table.filter(pl.col("digest").is_not_null())
        .unique(["step", *key], keep="first", maintain_order=True)
        .sort("step", maintain_order=True)
        .with_columns(before=pl.col("digest").shift(1).over(key))
        .filter(pl.col("before").is_not_null())
        .select("step", *key, changed=pl.col("digest") != pl.col("before"))
    )
