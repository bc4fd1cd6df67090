"""Changes of parameters, apart from flipped signs.

An adaptive optimizer's first step is nearly a sign, so a few elements with tiny gradients may flip
on a correct device, each a large difference in one place. A wrong learning rate, decay or moment
changes all elements instead. A sketch tells them apart: a flip falls into one of its 61 buckets,
what is dense into all, so the median over the buckets' differences sees only what is dense.

A router's row for an expert that no token was sent to (or none that the loss depends on) has no
gradient, or round-off in place of one, where weights are normalised over the chosen experts: an
optimizer that divides by the gradient's size moves the whole row by it. That looks dense, and such
a router's change is judged as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from rlprobe import sketch_floors
from rlprobe.judge import sketched
from rlprobe.judge.inputs import Results
from rlprobe.judge.noise_updates import GRADIENTS
from rlprobe.judge.routed import with_idle
from rlprobe.judge.row import Row

CHANGE = "change"
#: A parameter of one expert of several, and what routers are called beside them.
_EXPERT = r"^(.*)\.experts\.\d+\."
_ROUTERS = ("gate", "router")
#: Median of |x| of a standard normal variable.
_MEDIAN = 0.6744897501960817


def dense(
    parts: Sequence[pl.DataFrame],
    results: Results,
    stage: str,
    step: int,
    joined: sketched.Joined = sketched.NOTHING,
) -> pl.DataFrame | None:
    """Relative L2 of changes' differences without their few largest parts, from both sketches.

    Args:
        parts: the stage's rows, of one rank or several each.
        results: where the runs' sketches are found.
        stage: canonical name.
        step: captured step, from 0.
        joined: the sketches of what several shards were joined to.

    Returns:
        rank, name, ``dense_error``; None where no change has sketches on both sides.

    Raises:
        StoreError: a record table is damaged.
    """
    changed = (pl.col("slot") == CHANGE) & (pl.col("status") == "matched")
    columns = ["rank", "name", "name_benchmark", "name_target", "norm_benchmark"]
    changes = pl.concat(part.filter(changed).select(columns) for part in parts)
    found = sketched.both(results, stage, step, changes, [CHANGE], joined)
    if found is None:
        return None
    both, b, t = found
    buckets = b.shape[1]
    typical = np.median(np.abs(t - b), axis=1) / _MEDIAN * np.sqrt(buckets)
    norms = both.get_column("norm_benchmark").to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(norms > 0, typical / norms, np.where(typical > 0, np.inf, 0.0))
    errors = both.select("rank", "name").with_columns(dense_error=pl.Series(error))
    for router in {*with_idle(results, stage, step), *_without_gradient(parts)}:
        errors = errors.filter(~pl.col("name").str.starts_with(f"{router}."))
    return errors.unique(["rank", "name"], keep="first")


def with_dense(rows: pl.DataFrame, errors: pl.DataFrame | None) -> pl.DataFrame:
    """Add ``dense_error`` of :func:`dense`; null for what it has not."""
    if errors is None:
        return rows.with_columns(dense_error=pl.lit(None, pl.Float64))
    return rows.join(errors, on=["rank", "name"], how="left", maintain_order="left")


def _without_gradient(parts: Iterable[pl.DataFrame]) -> set[str]:
    """Routers of a layer one of whose experts has no gradient at all."""
    none = (
        pl.col("slot").is_in(GRADIENTS)
        & (pl.min_horizontal("norm_benchmark", "norm_target") == 0)
        & pl.col("name").str.contains(_EXPERT)
    )
    names = pl.concat(part.filter(none).select("name") for part in parts).get_column("name")
    layers = names.str.extract(_EXPERT).unique()
    return {f"{layer}.{router}" for layer in layers for router in _ROUTERS}


def dense_bound(row: Row) -> float:
    """The bound on a change's dense part."""
    return max(row.get("noise_dense") or 0.0, sketch_floors.DEVICES)


def raise_excess(rows: pl.DataFrame) -> pl.DataFrame:
    """Let ``excess`` of a change be at least its dense part's over the bound on that."""
    bound = pl.max_horizontal("noise_dense", pl.lit(sketch_floors.DEVICES))
    # A repeat that is not exact raises this bound as it raises the floor.
    bound = bound * (pl.col("floor") / pl.col("noise")).clip(lower_bound=1.0).fill_nan(1.0)
    return rows.with_columns(
        excess=pl.max_horizontal("excess", (pl.col("dense_error") / bound).fill_nan(0.0))
    )
