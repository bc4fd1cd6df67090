"""What leaves a stage: results that others use, and gradients of parameters.

Results are held against their floor twice. Over all values, by the relative L2 difference: that
one token of very many is wrong hides below it, the better the more tokens there are. And **each
value by itself**: with a floor f on the root mean square, a value's round-off is a sum of many
roundings of random sign, whose deviation is taken to be at most f times the value's scale (f is
:data:`rlprobe.judge.noise.SAFETY` times what is expected of all of them, which is left for values
that are noisier than most). Such a sum exceeds x deviations with a chance below ``2 exp(-x**2/2)``,
so that of n values none does but once in ``1 / FALSE_ALARM`` comparisons with
``x = sqrt(2 log(2 n / FALSE_ALARM))``: 6 of a hundred values, 7 of a hundred thousand, where the
relative L2 difference needs ``sqrt(n)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

#: A norm of gradients may differ by its own summing, whatever the gradients do.
_NORM = 1e-4
#: Chance that a single value of correct devices' results exceeds what it is allowed.
FALSE_ALARM = 1e-6
#: What an outcome is measured by: all values together, or the one that is farthest off.
ALL_VALUES, SINGLE_VALUE = "values", "single value"
#: Of another format than the benchmark's, where one precision was asked for: however far off.
OTHER_FORMAT = "format"
#: Columns that :func:`norm_floor` looks at.
_NORMED = ("slot", "update", "floor", "norm_benchmark")


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
    #: What error and floor are of.
    measure: str = ALL_VALUES

    @property
    def excess(self) -> float:
        """Multiple of the floor."""
        if self.lopsided or self.measure == OTHER_FORMAT:
            return float("inf")
        if self.error == 0:
            return 0.0
        return self.error / self.floor if self.floor > 0 else float("inf")


def tail(count: int) -> float:
    """How many deviations the largest of so many values may be from 0 by chance."""
    return math.sqrt(2.0 * math.log(2.0 * max(count, 1) / FALSE_ALARM))


def nearer(whole: Outcome, peak: float, floor: float) -> Outcome:
    """The outcome, or what its farthest value says where that alone is beyond its floor.

    Args:
        whole: of all values.
        peak: the farthest value's difference, relative to its scale.
        floor: what that may be.
    """
    single = dataclasses.replace(whole, error=peak, floor=floor, measure=SINGLE_VALUE)
    return single if whole.excess <= 1 < single.excess else whole


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
        columns = [name for name in _NORMED if name in every.columns]
        rows = every.select(columns).filter(
            pl.col("slot").is_in(["grad", "grad_reduced"]) & pl.col("floor").is_finite()
        )
        for slot in rows.partition_by("slot", "update" if "update" in rows.columns else "slot"):
            norms, floors = (slot.get_column(c).to_numpy() for c in ("norm_benchmark", "floor"))
            whole = float(np.sqrt(np.nansum(norms**2)))
            if whole > 0:
                found.append(float(np.sqrt(np.nansum((norms * floors) ** 2))) / whole)
    return max(found)
