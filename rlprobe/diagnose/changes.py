"""Changes of parameters, apart from flipped signs.

An adaptive optimizer's first step is nearly a sign, so a few elements with tiny gradients may flip
on a correct device, each a large difference in one place. A wrong learning rate, decay or moment
changes all elements instead. A sketch tells them apart: a flip falls into one of its 61 buckets,
what is dense into all, so the median over the buckets' differences sees only what is dense.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.compare.noise import SKETCH_RESOLUTION
from rlprobe.diagnose.inputs import BENCHMARK, TARGET, Results
from rlprobe.errors import StoreError
from rlprobe.store import records
from rlprobe.store.read import Run

CHANGE = "change"
#: rank, name -> sketches of the benchmark's and the target's whole tensor.
Joined = Mapping[tuple[int, str], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
#: Median of |x| of a standard normal variable.
_MEDIAN = 0.6744897501960817


def with_dense(
    rows: pl.DataFrame, results: Results, stage: str, step: int, joined: Joined | None = None
) -> pl.DataFrame:
    """Add ``dense_error``: relative L2 of a change's difference without its few largest parts.

    Null for other records, and where a side has no sketch. ``joined`` has the sketches of what was
    joined of several shards, by rank and name.

    Raises:
        StoreError: a record table is damaged.
    """
    nothing = rows.with_columns(dense_error=pl.lit(None, pl.Float64))
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    if runs[0] is None or runs[1] is None or not rows.get_column("slot").eq(CHANGE).any():
        return nothing
    left, right = (_sketches(run, stage, step) for run in runs if run is not None)
    if left is None or right is None:
        return nothing
    both = (
        rows.filter((pl.col("slot") == CHANGE) & (pl.col("status") == "matched"))
        .select("rank", "name", "name_benchmark", "name_target", "norm_benchmark")
        .join(left, left_on=["rank", "name_benchmark"], right_on=["rank", "name"])
        .join(right, left_on=["rank", "name_target"], right_on=["rank", "name"], suffix="_target")
    )
    if joined:
        both = _with_joined(both, rows, joined)
    if both.is_empty():
        return nothing
    b, t = (np.array(both.get_column(name).to_list()) for name in ("sketch", "sketch_target"))
    if b.ndim != 2 or b.shape != t.shape:
        return nothing
    buckets = b.shape[1]
    typical = np.median(np.abs(t - b), axis=1) / _MEDIAN * np.sqrt(buckets)
    norms = both.get_column("norm_benchmark").to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(norms > 0, typical / norms, np.where(typical > 0, np.inf, 0.0))
    dense = both.select("rank", "name").with_columns(dense_error=pl.Series(error))
    return rows.join(
        dense.unique(["rank", "name"], keep="first"),
        on=["rank", "name"],
        how="left",
        maintain_order="left",
    )


def _with_joined(both: pl.DataFrame, rows: pl.DataFrame, joined: Joined) -> pl.DataFrame:
    """``both`` with the sketches of wholes in place of single shards'."""
    mine = rows.filter((pl.col("slot") == CHANGE) & (pl.col("status") == "matched"))
    added = [
        row | dict(zip(("sketch", "sketch_target"), map(list, pair), strict=True))
        for row in mine.select("rank", "name", "norm_benchmark").iter_rows(named=True)
        if (pair := joined.get((row["rank"], row["name"]))) is not None
    ]
    columns = ["rank", "name", "norm_benchmark", "sketch", "sketch_target"]
    wholes = pl.DataFrame(added, schema=both.select(columns).schema)
    rest = both.select(columns).join(wholes, on=["rank", "name"], how="anti")
    return pl.concat([rest, wholes.select(columns)])


def raise_excess(rows: pl.DataFrame) -> pl.DataFrame:
    """Let ``excess`` of a change be at least its dense part's over the bound on that."""
    bound = pl.max_horizontal("noise_dense", pl.lit(SKETCH_RESOLUTION))
    # A repeat that is not exact raises this bound as it raises the floor.
    bound = bound * (pl.col("floor") / pl.col("noise")).clip(lower_bound=1.0).fill_nan(1.0)
    return rows.with_columns(
        excess=pl.max_horizontal("excess", (pl.col("dense_error") / bound).fill_nan(0.0))
    )


def _sketches(run: Run, stage: str, step: int) -> pl.DataFrame | None:
    try:
        path = run.records(stage)
    except StoreError:
        return None  # not captured: the gate says so
    found = (
        records.scan(path)
        .filter((pl.col("slot") == CHANGE) & (pl.col("step") == step))
        .select("rank", "name", pl.col("sketch").cast(pl.List(pl.Float64)))
        .filter(pl.col("sketch").is_not_null())
    )
    try:
        table = found.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise StoreError(f"{path} is not a readable record table: {error}") from error
    return table if table.height else None
