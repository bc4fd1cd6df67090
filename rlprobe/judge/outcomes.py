"""What leaves a stage: results that others use, and gradients of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

#: A norm of gradients may differ by its own summing, whatever the gradients do.
_NORM = 1e-4


@dataclass(frozen=True)
class Outcome:
    """Something that leaves a stage, measured: relative error and its floor."""

    name: str
    error: float
    floor: float
    #: How many of its numbers are not finite on one side alone, and which side: beyond anything.
    lopsided: int = 0
    side: str | None = None
    #: How many numbers it is of; 0 where unknown.
    count: int = 0

    @property
    def excess(self) -> float:
        """Multiple of the floor."""
        if self.lopsided:
            return float("inf")
        if self.error == 0:
            return 0.0
        return self.error / self.floor if self.floor > 0 else float("inf")


def gradients(rows: pl.DataFrame) -> list[Outcome]:
    """A stage's parameter gradients as outcomes; empty for a stage that only runs forward."""
    columns = ["name", "slot", "judged", "error", "floor"]
    leaving = rows.select(columns).filter(
        pl.col("judged")
        & pl.col("error").is_not_null()
        & pl.col("slot").is_in(["grad", "grad_reduced", "grad_clipped"])
    )
    return [
        Outcome(name, error, floor)
        for name, error, floor in leaving.select("name", "error", "floor").iter_rows()
    ]


def norm_floor(stages: Iterable[pl.DataFrame]) -> float:
    """What a norm of all gradients may differ by: of each as much as it carries of the whole.

    Args:
        stages: judged rows of stages.
    """
    found = [_NORM]
    for every in stages:
        rows = every.filter(
            pl.col("slot").is_in(["grad", "grad_reduced"]) & pl.col("floor").is_finite()
        )
        for slot in rows.partition_by("slot", "update" if "update" in rows.columns else "slot"):
            norms, floors = (slot.get_column(c).to_numpy() for c in ("norm_benchmark", "floor"))
            whole = float(np.sqrt(np.nansum(norms**2)))
            if whole > 0:
                found.append(float(np.sqrt(np.nansum((norms * floors) ** 2))) / whole)
    return max(found)
