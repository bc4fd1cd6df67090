"""Causes in backward code, in the accumulation of gradients and in the optimizer."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import polars as pl

from rlprobe.diagnose.cause import repeated
from rlprobe.diagnose.cause.found import Found, unknown
from rlprobe.diagnose.cause.shape import Shape, of, times
from rlprobe.judge import execution
from rlprobe.judge import origin as kinds
from rlprobe.judge.analysis import Finding
from rlprobe.judge.origin import Origin


def backward(finding: Finding, shape: Shape, row: dict[str, Any]) -> Found:
    """The cause where a gradient of activations parts first, within a module."""
    if shape.factor == 0:
        return unknown("the gradient is 0 on the target")
    if shape.factor is not None and repeated.factors(finding, row) is not None:
        said = f"the gradient is {times(shape.factor)} times the benchmark's"
        return Found("constant_factor", [said])
    if shape.permuted:
        return Found("layout", [
            "max, min and norm of the gradient are equal and its elements differ by "
            f"{shape.error:.2g}: as where the same numbers stand in other places"
        ])  # fmt: skip
    if shape.rounded_to is not None and repeated.rounds(finding, row):
        return Found("rounding_order", [shape.said_rounding()])
    return unknown(f"an error of {shape.error:.2g} in {row['name']}")


def accumulated(finding: Finding, origin: Origin, shape: Shape, world_size: int) -> Found:
    """The cause where parameters' gradients part while activations' agree."""
    rows = finding.stage.rows.filter(
        pl.col("judged")
        & (pl.col("slot") == origin.row["slot"])
        & pl.col("beyond")
        & (pl.col("micro_batch") == origin.row["micro_batch"])
    )
    common = common_factor(rows)
    if origin.kind == kinds.CLIPPING:
        return _clipping(finding, origin, rows, common, world_size)
    if origin.kind == kinds.WEIGHT_GRADIENT:
        return backward(finding, shape, origin.row)
    if common is not None and common.count >= _MOST * common.total:
        return _multiple(common, world_size)
    shapes = [of(each) for each in rows.iter_rows(named=True)]
    formats = {each.rounded_to for each in shapes}
    if len(shapes) > 1 and None not in formats and len(formats) == 1:
        said = f"all {len(shapes)} gradients that differ are rounded to {formats.pop()}: in each"
        return Found("rounding_order", [f"{said}, {shape.said_rounding()}"])
    if origin.kind == kinds.REDUCTION and not kinds.has_activations(finding.stage.rows):
        return unknown(
            "by no common factor; they may have parted in the model, in the loss, or when they "
            "were summed up or reduced"
        )
    if origin.kind == kinds.REDUCTION and world_size > 1 and _before(finding):
        said = (
            "each process's gradients agree before they are reduced over the ranks, and not after"
        )
        return Found("reduction", [said])
    if _later(finding, origin) and _before(finding):
        said = "the first micro-batch's gradients agree, and those summed up with later ones do not"
        growth = _growth(finding)
        if growth is not None and growth > 0.25:
            said += f"; their error grows with the micro-batches (exponent {growth:.2f})"
        return Found("accumulation", [said])
    return unknown("activations' gradients agree and parameters' do not, by no common factor")


def _clipping(
    finding: Finding, origin: Origin, rows: pl.DataFrame, common: Common | None, world_size: int
) -> Found:
    apart = _rank_factors(finding, origin) if world_size > 1 else None
    if apart is not None:
        return Found("reduction", [
            f"gradients after clipping are {apart[0]:.6g} to {apart[1]:.6g} times the "
            "benchmark's, one factor a rank: they are clipped by a norm of their own"
        ])  # fmt: skip
    one = common is not None and common.count == common.total
    if one and common is not None and common.factor < 0:
        # a norm is never negative, so no clipping turns a gradient around
        return _multiple(common, world_size)
    said = _clipped(rows, common)
    return Found("hyperparameter", [said]) if one else unknown(said)


def _multiple(common: Common, world_size: int) -> Found:
    factor, every = common.factor, common.of_what("gradients that differ")
    whole = [n for n in (world_size, 1 / world_size, math.sqrt(world_size))
             if world_size > 1 and abs(factor / n - 1.0) < _WHOLE]  # fmt: skip
    if whole:
        return Found("reduction", [
            f"{every} are {factor:.4g} times the benchmark's, and the world has {world_size} "
            "processes: as with a sum where a mean is due, or the other way round"
        ])  # fmt: skip
    return Found("constant_factor", [f"{every} are {times(factor)} times the benchmark's"])


#: A factor is that of the world's size within this share.
_WHOLE = 1e-3


def _before(finding: Finding) -> bool:
    """Whether parameters' gradients were judged in the first micro-batch, and agree there."""
    first = finding.stage.rows.filter(
        pl.col("judged") & (pl.col("slot") == "grad") & (pl.col("micro_batch") == 0)
        & (pl.col("phase") == execution.BACKWARD)
    )  # fmt: skip
    return first.height > 0 and not first.get_column("beyond").any()


def _later(finding: Finding, origin: Origin) -> bool:
    """Whether gradients part after the first micro-batch, and before they are clipped."""
    micro_batch = origin.row.get("micro_batch")
    if origin.kind == kinds.ACCUMULATION:
        return bool(micro_batch)
    passes = finding.stage.rows.filter(pl.col("phase") == execution.BACKWARD)
    return origin.kind == kinds.REDUCTION and passes.get_column("micro_batch").n_unique() > 1


def _rank_factors(finding: Finding, origin: Origin) -> tuple[float, float] | None:
    """Smallest and largest of the ranks' factors; None where they share one, or one has none."""
    rows = finding.stage.rows.filter(
        pl.col("judged")
        & (pl.col("slot") == origin.row["slot"])
        & (pl.col("micro_batch") == origin.row["micro_batch"])
        & (pl.col("norm_benchmark") > 0)
    )
    factors = []
    for own in rows.partition_by("rank"):
        # the ranks' shards are of one gradient: clipping by its norm is one factor for all of them
        if not own.get_column("beyond").any():
            factors.append(1.0)
            continue
        common = common_factor(own)
        if common is None or common.count < _MOST * common.total:
            return None
        factors.append(common.factor)
    if len(factors) < 2:
        return None
    low, high = min(factors), max(factors)
    off = max(abs(low - 1.0), abs(high - 1.0))
    return (low, high) if high - low > 0.1 * off + 1e-6 else None


@dataclass(frozen=True)
class Common:
    """A factor that most records differ by."""

    factor: float
    #: Records that differ by it, and all.
    count: int
    total: int

    def of_what(self, what: str) -> str:
        """How many it is true of, in words."""
        if self.count == self.total:
            return f"all {self.total} {what}" if self.total > 1 else f"the {what}"
        return f"{self.count} of {self.total} {what}"


#: Ratios of norms are of one factor where they differ by this share of its effect at most.
_ONE = 0.05
#: Share of the gradients that must differ by one factor to be called a multiple.
_MOST = 0.75


def common_factor(rows: pl.DataFrame) -> Common | None:
    """The factor that at least half of the rows' norms differ by; None where there is none."""
    shapes = [of(row) for row in rows.iter_rows(named=True)]
    ratios = _ratios(shapes)
    if not ratios:
        return None
    middle = statistics.median(ratios)
    spread = statistics.median(abs(r - middle) for r in ratios)
    if abs(middle - 1.0) < 1e-6 or spread > 0.01 * abs(middle - 1.0) + 1e-6:
        return None
    measured = [s for s in shapes if s.error > 0]
    scaled = sum(s.scaled for s in measured)
    near = _ONE * min(abs(middle - 1.0), abs(middle)) + 2e-6
    count = sum(abs(r - middle) <= near for r in ratios)
    return Common(middle, count, len(ratios)) if scaled * 2 >= len(measured) else None


def _ratios(shapes: list[Shape]) -> list[float]:
    return [shape.factor for shape in shapes if shape.factor is not None]


def _clipped(rows: pl.DataFrame, common: Common | None) -> str:
    """Evidence of a clipping that makes other gradients of the same ones."""
    ratios = _ratios([of(row) for row in rows.iter_rows(named=True)])
    if common is not None and common.count == common.total:
        return (
            f"{common.of_what('gradients that differ')} after clipping are {times(common.factor)} "
            "times the benchmark's: clipped at another norm, or by another one"
        )
    if not ratios:
        return "gradients part in the clipping"
    most = "" if common is None else f", {common.count} of them {times(common.factor)} times"
    return (
        f"the {len(ratios)} gradients after clipping that differ are {times(min(ratios))} to "
        f"{times(max(ratios))} times the benchmark's{most}: not by one factor, as where all are "
        "clipped by one norm"
    )


def _growth(finding: Finding) -> float | None:
    """Exponent of the growth of accumulated gradients' error over micro-batches."""
    rows = finding.stage.rows.filter(
        (pl.col("slot") == "grad")
        & (pl.col("phase") == execution.BACKWARD)
        & pl.col("judged")
        & (pl.col("error") > 0)
    )
    means = rows.group_by("micro_batch").agg(pl.col("error").median()).sort("micro_batch").rows()
    if len(means) < 3:
        return None
    x = [math.log(micro_batch + 1) for micro_batch, _ in means]
    y = [math.log(error) for _, error in means]
    slope, _ = statistics.linear_regression(x, y)
    return slope


def optimizer(finding: Finding) -> Found:
    """The cause where changes of parameters part while their gradients agree."""
    rows = finding.stage.rows.filter(
        pl.col("judged") & (pl.col("phase") == execution.CHANGES) & pl.col("error").is_not_null()
    )
    beyond = rows.filter(pl.col("beyond"))
    said = [f"{beyond.height} of {rows.height} parameters changed otherwise"]
    if beyond.is_empty():  # seen by what runs on the weights (:func:`kinds.find`)
        said = ["parameters changed otherwise: what runs on the weights that it left says so"]
    missing = beyond.filter((pl.col("norm_target") == 0) & (pl.col("norm_benchmark") > 0))
    if missing.height:
        said.append(f"{missing.height} did not change at all on the target")
    common = common_factor(beyond)
    if common is not None:
        said.append(
            f"{common.of_what('changes that differ')} are {times(common.factor)} times the "
            "benchmark's: another learning rate, or another correction of the first steps"
        )
    return Found("optimizer", said)
