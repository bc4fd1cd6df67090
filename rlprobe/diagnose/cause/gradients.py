"""Where a gradient parts: of activations, of parameters, reduced, clipped, or what it changes."""

from __future__ import annotations

import math
import statistics

import polars as pl

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.around import Scene, Symptoms
from rlprobe.diagnose.cause.differences import Changes, Parameters, Record
from rlprobe.diagnose.cause.hypotheses import factor
from rlprobe.diagnose.cause.measure import times
from rlprobe.judge import execution
from rlprobe.judge import origin as kinds
from rlprobe.judge.row import columns_where
from rlprobe.judge.row import each as each_row
from rlprobe.said import NOTHING_SAID, Said, say


def activations(scene: Scene) -> Symptoms:
    """A gradient of activations, within a module."""
    row = scene.row
    if measure.of(row).factor == 0:
        return Symptoms([], [say("the gradient is 0 on the target")])
    record = Record.of(scene.finding, row, inside=scene.is_inside, what=say("gradient"))
    said = [say("an error of {error:.2g} in {name}", error=measure.of(row).error, name=row["name"])]
    return Symptoms([record], said if (row.get("error") or 0.0) > 0 else [])


def parameters(scene: Scene) -> Symptoms:
    """Gradients of parameters, while those of activations agree."""
    if scene.origin.kind == kinds.WEIGHT_GRADIENT:
        return activations(scene)
    alike = scene.finding.stage.rows.filter(
        pl.col("judged")
        & (pl.col("slot") == scene.row["slot"])
        & (pl.col("micro_batch") == scene.row["micro_batch"])
    )
    rows = alike.filter("beyond")
    kind, size = scene.origin.kind, scene.world_size
    first = _first_agrees(scene)
    found = Parameters(
        rows, kind, size, first, _own_agree(scene), first and _later(scene),
        _of_ranks(scene) if kind == kinds.CLIPPING and size > 1 else None,
        _growth(scene), _agreeing(alike) if kind == kinds.CLIPPING else (),
    )  # fmt: skip
    record = Record.of(scene.finding, scene.row, inside=False, what=say("gradient"))
    odd = record.row.get("status") == "nonfinite" or record.row.get("other_format")
    alone = rows.height == 1 and kind != kinds.CLIPPING
    return Symptoms([found, record] if odd or alone else [found], _described(scene, found))


def _described(scene: Scene, found: Parameters) -> list[Said]:
    rows = found.rows
    if scene.origin.kind == kinds.CLIPPING:
        return [_clipped(rows), *_beside(found)]
    if scene.origin.kind == kinds.REDUCTION and not kinds.has_activations(scene.finding.stage.rows):
        return [
            say(
                "{count} gradients differ; they may have parted in the model, in the loss, "
                "or when they were summed up or reduced",
                count=rows.height,
            )
        ]
    return [
        say("activations' gradients agree, and {count} of parameters do not", count=rows.height)
    ]


def _agreeing(rows: pl.DataFrame) -> tuple[float, ...]:
    """Floors of those that are not zero and agree, nothing excusing them, of ranks that differ."""
    # a rank of which all agree clipped by another norm than those that differ
    apart = rows.filter("beyond").get_column("rank").unique()
    rows = rows.filter(pl.col("rank").is_in(apart.implode()))
    agree = ~pl.col("beyond") & (pl.col("norm_benchmark") > 0) & pl.col("floor").is_not_null()
    if "excused_by" in rows.columns:
        agree = agree & pl.col("excused_by").is_null()
    return tuple(rows.filter(agree).get_column("floor"))


def _beside(found: Parameters) -> list[Said]:
    """That others agree after clipping, where those that differ do so by one factor."""
    by = factor.common(found.rows)
    spared = 0 if by is None or not by.is_of_all else found.spared(by.factor)
    if not spared:
        return []
    if spared == 1:
        return [say("1 other gradient agrees: clipping by one norm leaves none out")]
    return [
        say("{count} other gradients agree: clipping by one norm leaves none out", count=spared)
    ]


def _first_agrees(scene: Scene) -> bool:
    """Whether parameters' gradients were judged in the first micro-batch, and agree there."""
    return _agree(_before_reduction(scene).filter(pl.col("micro_batch") == 0))


def _own_agree(scene: Scene) -> bool:
    """Whether each process's gradients were judged in every micro-batch, and agree there."""
    backward = scene.finding.stage.rows.filter(pl.col("phase") == execution.BACKWARD)
    own = _before_reduction(scene)
    passes = ["rank", "micro_batch"]
    return own.select(passes).n_unique() == backward.select(passes).n_unique() and _agree(own)


def _before_reduction(scene: Scene) -> pl.DataFrame:
    """Judged gradients of parameters as each process's backward passes leave them."""
    return scene.finding.stage.rows.filter(
        pl.col("judged") & (pl.col("slot") == "grad") & (pl.col("phase") == execution.BACKWARD)
    )


def _agree(rows: pl.DataFrame) -> bool:
    return rows.height > 0 and not rows.get_column("beyond").any()


def _later(scene: Scene) -> bool:
    """Whether gradients part in the sums that later micro-batches are added to.

    Where the sums were judged after the last micro-batch and agree, it is not in them.
    """
    if scene.origin.kind == kinds.ACCUMULATION:
        return bool(scene.row.get("micro_batch"))
    if scene.origin.kind != kinds.REDUCTION:
        return False
    backward = pl.col("phase") == execution.BACKWARD
    passes = columns_where(scene.finding.stage.rows, backward, "judged", "slot", "micro_batch")
    sums = passes.filter(
        pl.col("judged") & (pl.col("slot") == "grad") & (pl.col("micro_batch") > 0)
    )
    return passes.get_column("micro_batch").n_unique() > 1 and sums.is_empty()


def _of_ranks(scene: Scene) -> tuple[float, float] | None:
    """Smallest and largest of the ranks' factors; None where they share one, or one has none."""
    rows = scene.finding.stage.rows.filter(
        pl.col("judged")
        & (pl.col("slot") == scene.row["slot"])
        & (pl.col("micro_batch") == scene.row["micro_batch"])
        & (pl.col("norm_benchmark") > 0)
    )
    factors, spread = [], 0.0
    for own in rows.partition_by("rank"):
        # the ranks' shards are of one gradient: clipping by its norm is one factor for all of them
        if not own.get_column("beyond").any():
            factors.append(1.0)
            continue
        common = factor.common(own)
        if common is None or not common.is_of_all:
            return None
        factors.append(common.factor)
        spread = max(spread, _spread(own))
    if len(factors) < 2:
        return None
    low, high = min(factors), max(factors)
    return (low, high) if high - low > _APART * spread + 1e-6 else None


#: Ranks have factors of their own where these are so many times further apart than one rank's are.
_APART = 4.0


def _spread(rows: pl.DataFrame) -> float:
    """By how much the gradients of one rank differ in their factor."""
    ratios = rows.get_column("norm_target") / rows.get_column("norm_benchmark")
    low, high = ratios.min(), ratios.max()
    return high - low if isinstance(low, float) and isinstance(high, float) else math.inf


def _clipped(rows: pl.DataFrame) -> Said:
    """How gradients after clipping differ, in words."""
    each = [measure.of(row).factor for row in each_row(rows)]
    ratios = [found for found in each if found is not None]
    if not ratios:
        return say("gradients part in the clipping")
    common = factor.common(rows)
    if common is not None and common.is_of_all:
        return say(
            "{every} differ by one factor", every=common.of_what(say("gradients that differ"))
        )
    most = NOTHING_SAID
    if common is not None:
        most = say(
            ", {count} of them {factor} times", count=common.count, factor=times(common.factor)
        )
    if times(min(ratios)) == times(max(ratios)):
        return say(
            "the norms of the {count} gradients after clipping that differ are {factor} times the "
            "benchmark's, and their elements are not: no clipping by another norm does that",
            count=len(ratios),
            factor=times(min(ratios)),
        )
    return say(
        "the {count} gradients after clipping that differ are {low} to "
        "{high} times the benchmark's{most}: not by one factor, as where all "
        "are clipped by one norm",
        count=len(ratios),
        low=times(min(ratios)),
        high=times(max(ratios)),
        most=most,
    )


def _growth(scene: Scene) -> float | None:
    """Exponent of the growth of accumulated gradients' error over micro-batches."""
    rows = columns_where(
        scene.finding.stage.rows,
        (pl.col("slot") == "grad")
        & (pl.col("phase") == execution.BACKWARD)
        & pl.col("judged")
        & (pl.col("error") > 0),
        *("micro_batch", "error"),
    )
    means = rows.group_by("micro_batch").agg(pl.col("error").median()).sort("micro_batch").rows()
    if len(means) < 3:
        return None
    x = [math.log(micro_batch + 1) for micro_batch, _ in means]
    y = [math.log(error) for _, error in means]
    slope, _ = statistics.linear_regression(x, y)
    return slope


def optimizer(scene: Scene) -> Symptoms:
    """Changes of parameters, while their gradients agree."""
    rows = scene.finding.stage.rows.filter(
        pl.col("judged") & (pl.col("phase") == execution.CHANGES) & pl.col("error").is_not_null()
    )
    updates = rows.get_column("update")
    first = rows.filter(pl.col("beyond")).get_column("update").min()
    # what a later update changes otherwise follows from the first
    rows = rows.filter(pl.col("update").eq_missing(pl.lit(first)))
    beyond = rows.filter(pl.col("beyond"))
    missing = beyond.filter((pl.col("norm_target") == 0) & (pl.col("norm_benchmark") > 0))
    number = int(first) if isinstance(first, int) and updates.n_unique() > 1 else None
    return Symptoms([Changes(beyond, rows.height, missing.height, number)])
