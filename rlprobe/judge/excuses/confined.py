"""Differences at positions that nothing depends on.

Two attention kernels may fill fully masked rows (padding) differently: 0 in one, the mean of all
values in the other. Whole tensors then differ by tens of per cent although every log-probability,
loss and gradient agrees. What a stage computes *for* others tells: a relative error that reaches
the results arrives there at about its own size, so one that is a thousand times larger than what
the results could show, while they agree within noise, stays where no result looks. Only attention
makes such rows: a difference that begins elsewhere (a constant added to all logits, which softmax
takes out again) is a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe.judge import execution
from rlprobe.judge.roundoff import UNIT

#: How much larger than the results' floor a relative error must be to have missed them all.
FACTOR = 1000.0


@dataclass(frozen=True)
class Outcome:
    """Something that leaves a stage, measured: relative error and its floor."""

    name: str
    error: float
    floor: float

    @property
    def excess(self) -> float:
        """Multiple of the floor."""
        if self.error == 0:
            return 0.0
        return self.error / self.floor if self.floor > 0 else float("inf")


def gradients(rows: pl.DataFrame) -> list[Outcome]:
    """A stage's parameter gradients as outcomes; empty for a stage that only runs forward."""
    leaving = rows.filter(
        pl.col("judged")
        & pl.col("error").is_not_null()
        & pl.col("slot").is_in(["grad", "grad_reduced", "grad_clipped"])
    )
    return [
        Outcome(name, error, floor)
        for name, error, floor in leaving.select("name", "error", "floor").iter_rows()
    ]


def is_confined(rows: pl.DataFrame, outcomes: list[Outcome]) -> bool:
    """Whether everything beyond its floor stays where no result looks.

    False without outcomes: then nothing says so.
    """
    beyond = rows.filter(pl.col("judged") & pl.col("beyond"))
    if beyond.is_empty() or not outcomes or any(outcome.excess > 1 for outcome in outcomes):
        return False
    if (beyond.get_column("phase") != execution.FORWARD).any():
        return False
    if (beyond.get_column("status") == "nonfinite").any():
        return False
    # Other tokens, positions or masks are no rounding of unused rows.
    if not beyond.get_column("dtype_benchmark").is_in(list(UNIT)).all():
        return False
    largest = beyond.get_column("error").max()
    floor = max(outcome.floor for outcome in outcomes)
    return isinstance(largest, float) and largest > FACTOR * floor
