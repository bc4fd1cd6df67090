"""Choices that fall the other way within round-off: a router's experts at near ties.

A router scores every token's experts and keeps the best k. Two experts whose scores are closer than
the devices' round-off are chosen differently by two correct devices, although scores are continuous
and agree. The token's further way is then another one: a difference of order one in few tokens.

- **Are they near ties?** All scores of the call agree within their floor, and no more choices
  differ than chance exceeds once in 1,000 calls (Poisson). Of n tokens with k of E experts each,
  n k boundaries may flip, each with the probability that the margin is smaller than the error of
  two scores. With E about normal scores of spread s the margin's density at 0 is 0.4 E / s at most;
  the difference of two scores has an error of 0.8 sqrt(2) e s in the mean, e being what the scores
  are seen to differ by.
- **What follows?** Rows of unrelated numbers in c of n tokens are a relative difference of
  sqrt(2 c / n). What runs after the choice, and the gradients, may differ by twice that, those of
  the update's later micro-batches too, which are sums with this one's. Inside the block that the
  choice steers, tokens are sorted by expert and stand in other places: nothing there can be judged.

More flips, or scores that disagree, are a fault of routing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import polars as pl

from rlprobe.judge import execution
from rlprobe.judge.excuse import Excuse, reduce
from rlprobe.judge.noise import FALSE_ALARM_RATE
from rlprobe.judge.noise_updates import poisson_quantile
from rlprobe.judge.reasons import NEAR_TIES
from rlprobe.judge.roundoff import UNIT

#: E|x| of a difference of two normal variables times the margin's density, over E e.
_FLIPS = 0.4 * 0.8 * math.sqrt(2.0)
#: Multiple of the unrelated rows' share that what follows may differ by.
_REACH = 2.0
#: Scores of another draw, or of other precision than a sketch tells, differ by as much at most.
_SEEN = 1.5
_CHOICE = r"^torch\.u?int\d+$"


@dataclass(frozen=True)
class _Choice:
    """A record of chosen experts that differs."""

    call_id: int
    micro_batch: int
    update: int
    sequence: int
    module: str
    #: [tokens, experts of each], or more.
    shape: tuple[int, ...]
    error: float
    #: ||indices|| on the benchmark, where it was recorded.
    norm: float | None


_COLUMNS = (
    "call_id", "micro_batch", "update", "sequence", "module", "shape_benchmark", "error",
    "norm_benchmark",
)  # fmt: skip


def excuses(rows: pl.DataFrame) -> tuple[list[Excuse], int]:
    """Wider floors for one process's rows behind choices at near ties.

    Args:
        rows: :func:`rlprobe.judge.excuse.begin`'s.

    Returns:
        the excuses, and how many choices fell the other way at most.
    """
    differing = rows.filter(
        (pl.col("slot") == "output")
        & (pl.col("phase") == execution.FORWARD)
        & pl.col("dtype_benchmark").str.contains(_CHOICE)
        & (pl.col("status") == "matched")
        & pl.col("judged")
        & pl.col("beyond")
        & pl.col("module").is_not_null()
    )
    given: list[Excuse] = []
    total = 0
    for call, micro_batch, update, sequence, module, shape, error, norm in (
        differing.sort("micro_batch", "sequence").select(_COLUMNS).iter_rows()
    ):
        choice = _Choice(
            call, micro_batch, update, sequence, module, tuple(shape or ()), error, norm
        )
        found = _flips(choice, rows)
        if found is not None:
            more = _behind(choice, found)
            rows = reduce(rows, more)  # one choice's scores may lie behind another's
            given += more
            total += found
    return given, total


def _flips(choice: _Choice, rows: pl.DataFrame) -> int | None:
    """Choices that fell the other way; None where near ties do not explain as many."""
    scores = rows.filter(
        (pl.col("call_id") == choice.call_id)
        & (pl.col("slot") == "output")
        & pl.col("dtype_benchmark").is_in(list(UNIT))
    )
    if scores.is_empty() or len(choice.shape) < 2 or scores.get_column("beyond").any():
        return None
    options = max(int(width) for width in scores.get_column("shape_benchmark").list.last())
    error = scores.get_column("error").max()
    if not isinstance(error, float) or options < 2:
        return None
    size = math.prod(choice.shape)
    allowed = int(poisson_quantile(size * _FLIPS * options * _SEEN * error, FALSE_ALARM_RATE)[0])
    # ||indices||^2 of choices spread evenly over 0 … E - 1; each that differs does so by 1 at least
    square = choice.norm**2 if choice.norm else size * (options - 1) * (2 * options - 1) / 6
    differ = choice.error**2 * square
    # two slots of a token may swap; a typical difference of two even choices is (E^2 - 1) / 6
    most = 2 * max((options**2 - 1) / 6, 1.0) * allowed
    if not allowed or differ > max(most, (options - 1) ** 2):
        return None
    return min(allowed, max(1, math.ceil(differ)))


def _behind(choice: _Choice, flips: int) -> list[Excuse]:
    """What a choice excuses: inside its block all, and a wider floor for what runs after it."""
    tokens = choice.shape[0]
    added = min(_REACH * math.sqrt(2.0 * flips / max(tokens, 1)), 2.0)
    updates = pl.col("phase") == execution.GRADIENTS
    backward = pl.col("phase") == execution.BACKWARD
    same_pass = pl.col("micro_batch") == choice.micro_batch
    later = same_pass & (backward | (pl.col("sequence") >= choice.sequence))
    # a parameter's gradient adds up over the micro-batches of an update
    summed = (
        backward
        & (pl.col("slot") == "grad")
        & (pl.col("update") == choice.update)
        & (pl.col("micro_batch") > choice.micro_batch)
    )
    behind = later | summed | updates
    block = choice.module.rpartition(".")[0]
    inside = pl.col("module").str.starts_with(f"{block}.") if block else pl.lit(False)
    itself = (pl.col("call_id") == choice.call_id) & (pl.col("sequence") == choice.sequence)
    return [
        Excuse(NEAR_TIES, (behind & inside) | itself),
        Excuse(NEAR_TIES, behind, added),
    ]
