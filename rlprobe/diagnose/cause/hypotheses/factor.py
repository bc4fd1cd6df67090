"""A multiple of the benchmark's numbers, t = f b.

e = |f - 1| alone says little where f is far from 1: with f = 0.16 and e = 0.89, t may well stand at
45 degrees to b. What the best multiple of b leaves of t decides. Sketches are linear, so that both
sides' sketches tell it as well as tensors do (:mod:`rlprobe.judge.multiples`); where there are
none, e**2 = 1 + f**2 - 2 f cos gives it.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import polars as pl

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.differences import Array, Parameters, Record, Tensors
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.judge import origin as kinds
from rlprobe.judge.roundoff import UNIT
from rlprobe.judge.row import Row, each, number
from rlprobe.said import Said, say

#: A floor is four standard deviations of round-off; a third of it is the most of what is left.
_NOISE = 1.0 / 3.0
#: What a multiple may leave where error and norms alone say, relative to the smaller of the
#: difference and of what remains: a sketch's error is 9 % uncertain.
_LEFT_BY_NORMS = 0.2
#: Last bits of a norm, which was summed in fp32.
_LAST_BITS = 2e-6


class OfRecord:
    """One factor explains a record, the same in all micro-batches."""

    needs = Record

    def fit(self, difference: Record) -> Fit | None:
        """Fit it; None where nothing is left or norms are unknown."""
        factor = measure.of(difference.row).factor
        lefts = [left(row) for row in difference.every]
        if not factor or any(found is None for found in lefts):
            return None
        known = [f for row in difference.every if (f := measure.of(row).factor)]
        floor = max(float(row.get("floor") or 0.0) for row in difference.every)
        unit = UNIT.get(str(difference.row.get("dtype_benchmark")), 0.0)
        allowed = _NOISE * floor + 2.0 * unit + _LAST_BITS * abs(factor - 1.0)
        spread = (max(known) - min(known)) / allowed if allowed else 0.0
        said = say(
            "the {what} is {factor} times the benchmark's",
            what=difference.what,
            factor=measure.times(factor),
        )
        return Fit(
            "constant_factor",
            (say("{said}, and nothing else of it differs", said=said),),
            max(spread, *(found for found in lefts if found is not None)),
            {"factor": factor},
            {"factor": _NOISE * floor},
        )


def left(row: Row) -> float | None:
    """What the best multiple leaves of a row, over what noise explains; None where unknown."""
    found = measure.of(row)
    if not found.exact or not found.factor or found.error <= 0 or found.factor == 1.0:
        return None
    beyond = _extremes(row, found.factor)
    noise = _NOISE * float(row.get("floor") or 0.0) * max(1.0, abs(found.factor))
    known = row.get("residual")
    if known is not None:
        unit = UNIT.get(str(row.get("dtype_benchmark")), 0.0) * max(1.0, abs(found.factor))
        return max(beyond, float(known) / (noise + 2.0 * unit + 1e-9))
    # ||t - b|| >= | ||t|| - ||b|| |, with equality for multiples
    low = found.error / (1.0 + 2.0 * float(row.get("error_uncertainty") or 0.0))
    lacks = max(low**2 - (found.factor - 1.0) ** 2, 0.0) / (2.0 * found.factor)
    if lacks >= 1.0:
        return math.inf
    remains = found.factor * math.sqrt(lacks * max(2.0 - lacks, 0.0))
    return max(beyond, remains / math.hypot(_LEFT_BY_NORMS * min(low, found.factor), noise))


def _extremes(row: Row, factor: float) -> float:
    """How far the extremes are from the same factor, over what is allowed.

    A fifth of the difference, or of what remains where that is less, and round-off.
    """
    rounding = 2.0 * UNIT.get(str(row.get("dtype_benchmark")), 0.0)
    allowed = 0.2 * min(abs(factor - 1.0), abs(factor)) + 2e-6 + rounding
    worst = 0.0
    for name, other in (("max", "min"), ("min", "max")):
        # what is turned around has its largest where the other has its smallest
        b = number(row, f"{name if factor > 0 else other}_benchmark")
        t = number(row, f"{name}_target")
        if b is None or t is None:
            continue
        off = abs(t - factor * b)
        if not off <= allowed * abs(b):
            worst = max(worst, off / (allowed * abs(b)) if b and math.isfinite(off) else math.inf)
    return worst


# of many gradients


@dataclass(frozen=True)
class Common:
    """A factor that most gradients differ by."""

    factor: float
    #: Gradients that differ by it, and all.
    count: int
    total: int

    @property
    def is_of_all(self) -> bool:
        """Whether every one that differs, differs by it."""
        return self.count == self.total

    def of_what(self, what: Said) -> Said:
        """How many it is true of, in words."""
        if self.is_of_all:
            if self.total == 1:
                return say("the {what}", what=what)
            return say("all {total} {what}", total=self.total, what=what)
        return say("{count} of {total} {what}", count=self.count, total=self.total, what=what)


#: Ratios of changes' norms are of one factor where they differ by this share of its effect at most:
#: decay and flipped signs come on top of a learning rate.
ONE = 0.05
#: The most that a multiple may leave of one of many, over what noise explains of one: its floor.
_OF_EACH = 1.0 / _NOISE


def common(rows: pl.DataFrame) -> Common | None:
    """The factor that gradients differ by; None where at least half do not.

    Each that is counted is that multiple: by its norm within its own floor, and by what the
    multiple leaves of it, which norms alone do not tell from other numbers of that size.
    """
    return _common(rows, 0.0, _OF_EACH)


def common_norm(rows: pl.DataFrame) -> Common | None:
    """The factor that changes' norms differ by, about; None where at least half do not."""
    return _common(rows, ONE, math.inf)


def _common(rows: pl.DataFrame, share: float, most: float) -> Common | None:
    every = [row for row in each(rows) if measure.of(row).factor is not None]
    ratios = [measure.of(row).factor or 0.0 for row in every]
    if not ratios:
        return None
    middle = statistics.median(ratios)
    spread = statistics.median(abs(r - middle) for r in ratios)
    if abs(middle - 1.0) < 1e-6 or spread > 0.01 * abs(middle - 1.0) + 1e-6:
        return None
    lefts = [left(row) for row in every]
    told = [found for found, row in zip(lefts, every, strict=True)
            if float(row.get("error") or 0.0) > 0]  # fmt: skip
    scaled = sum(found is not None and found <= 1.0 for found in told)
    near = share * min(abs(middle - 1.0), abs(middle)) + _LAST_BITS * max(1.0, abs(middle))
    count = sum(
        abs(ratio - middle) <= max(near, float(row.get("floor") or 0.0) * max(1.0, abs(middle)))
        and (found is None or found <= most)
        for row, ratio, found in zip(every, ratios, lefts, strict=True)
    )
    return Common(middle, count, len(ratios)) if min(scaled, count) * 2 >= len(told) else None


class OfParameters:
    """One factor explains the gradients of all parameters that differ."""

    needs = Parameters

    def fit(self, difference: Parameters) -> Fit | None:
        """Fit it; clipping has a law of its own, for factors that a norm may have."""
        if difference.kind == kinds.WEIGHT_GRADIENT:
            return None
        found = common(difference.rows)
        if found is None or not found.is_of_all:
            return None
        clipped = found.factor > 0 and not difference.spared(found.factor)
        if difference.kind == kinds.CLIPPING and clipped:
            return None
        every = found.of_what(say("gradients that differ"))
        said = say(
            "{every} are {factor} times the benchmark's",
            every=every,
            factor=measure.times(found.factor),
        )
        # what each process summed up agrees: it is the reduction over them that multiplies
        if (
            difference.kind == kinds.REDUCTION
            and difference.world_size > 1
            and difference.own_agree
        ):
            said += say(", and each process's own agree before they are reduced over the ranks")
            return Fit("reduction", (said,), 0.0, {"factor": found.factor})
        return Fit("constant_factor", (said,), 0.0, {"factor": found.factor})


class OfTensors:
    """One factor, fitted to every element, and so of every row."""

    needs = Tensors

    def fit(self, difference: Tensors) -> Fit | None:
        """Least squares; the standard error is that of the elements' scatter."""
        b, d = difference.benchmark, difference.difference
        square = float(np.sum(b * b))
        # of 0 on all places no factor is known
        if not square or not np.any(d) or not np.any(difference.target):
            return None
        by = float(np.sum(b * d)) / square
        rest = d - by * b
        share = float(np.sum(rest * rest)) / float(np.sum(d * d))
        error = math.sqrt(float(np.sum(rest * rest)) / max(d.size - 1, 1) / square)
        said = say(
            "the target is {by:.7g} times the benchmark: that explains {share:.2%} of "
            "the difference",
            by=1 + by,
            share=1 - share,
        )
        left_over = difference.left(b * (1.0 + by))
        residual = tensor_residual(difference, left_over, share)
        return Fit(
            "constant_factor", (said,), max(residual, _of_rows(difference, rest)),
            {"factor": 1.0 + by}, {"factor": error}, left=share,
        )  # fmt: skip


#: Rows that are looked at: those whose difference is this share of the largest row's, or more.
_OF_LARGEST = 1e-2
#: Rows that hold the fit, by their difference; what is left of these is noise, or the fit is bad.
_LEADING = 0.1
#: Standard deviations of that noise.
_DEVIATIONS = 3.0


def _of_rows(difference: Tensors, rest: Array) -> float:
    """The most that the multiple leaves of one row, over what noise and the factor explain of it.

    A few rows may hold the difference and the fit with it, and be another multiple than the rest.
    """
    own, other = (np.linalg.norm(x, axis=-1) for x in (difference.difference, difference.target))
    leaves = np.linalg.norm(rest, axis=-1)
    leading = np.argsort(own)[::-1][: max(1, round(_LEADING * own.size))]
    noise = _DEVIATIONS * float(np.sqrt(np.mean(leaves[leading] ** 2)))
    seen = own >= _OF_LARGEST * own.max()
    # rows of nothing on both sides are no other multiple
    allowed = np.maximum(_LEFT_BY_NORMS * np.minimum(own, other), noise)
    over = np.where(seen, leaves / np.maximum(allowed, np.finfo(np.float64).tiny), 0.0)
    return float(over.max()) if noise or seen.any() else 0.0


#: Share of a difference's square that a law of elements may leave where no floor is known.
UNEXPLAINED = 0.02


def tensor_residual(difference: Tensors, left_over: float, share: float) -> float:
    """What a law of elements leaves, over the floor, or over the most where none is known.

    That is held against the smaller of the difference and of the target's numbers: where little
    remains of the benchmark's, the difference is all of them, whatever the law.

    Args:
        difference: the elements.
        left_over: relative L2 error that the law leaves.
        share: of the difference's square that it leaves.
    """
    if share:
        remains = float(np.sum(difference.target**2)) / float(np.sum(difference.difference**2))
        share = share / min(1.0, remains) if remains else math.inf
    if difference.floor is None:
        return share / UNEXPLAINED
    return max(left_over / difference.floor if difference.floor else share / UNEXPLAINED,
               share / (2.0 * UNEXPLAINED))  # fmt: skip
