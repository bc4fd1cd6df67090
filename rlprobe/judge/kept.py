"""How finely an update's changes are known: the format that weights are kept in between updates.

A change is a difference of weights. Read off weights of 16 bits it is off by up to half a unit in
the last place of the *weight*, at most u |w| an element and update, which is more than most updates
change. Read off fp32 weights, or off fp32 copies that an optimizer steps
(:data:`rlprobe.store.parts.COPIES`), it is off by nothing that matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rlprobe.judge import digested, roundoff
from rlprobe.judge.inputs import Results
from rlprobe.judge.noise_updates import CHANGE
from rlprobe.roles import BENCHMARK, TARGET

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: Of a change: the largest L2 norm of what rounding the weights makes of it, both sides together;
#: null where neither side's weights are of 16 bits or fewer.
COLUMN = "rounding"


def with_rounding(parts: list[pl.DataFrame], results: Results, stage: str, step: int) -> None:
    """Add :data:`COLUMN` to the rows of a stage, in place.

    Args:
        parts: frames of compare's rows.
        results: where the runs are found.
        stage: canonical name.
        step: captured step, from 0.

    Raises:
        StoreError: a table of weights is damaged.
    """
    parts[:] = [part.with_columns(pl.lit(None, pl.Float64).alias(COLUMN)) for part in parts]
    if not any(part.get_column("slot").eq(CHANGE).any() for part in parts):
        return
    for role in (BENCHMARK, TARGET):
        run = results.run(role)
        found = None if run is None else coarse(run, stage, step)
        if found is not None:
            parts[:] = [_added(part, found, role) for part in parts]


def coarse(run: Run, stage: str, step: int) -> pl.DataFrame | None:
    """Parameters whose changes were read off weights of 16 bits or fewer; None where none are.

    Returns:
        rank (null: of the whole), module, index, size (elements), format, norm.

    Raises:
        StoreError: a table of weights is damaged.
    """
    table = run.weights()
    if table is None:
        return None
    at = (pl.col("stage") == stage) & (pl.col("step") == step)
    here = table.filter(at).unique(["rank", "name"], keep="first", maintain_order=True)
    copies = run.gradients()
    if copies is not None:
        stepped = copies.filter(at & pl.col("kept").is_not_null()).get_column("name")
        here = here.filter(~pl.col("name").is_in(stepped.unique().implode()))
    narrow = here.filter(roundoff.unit("dtype") > roundoff.FP32)
    if narrow.is_empty():
        return None
    return digested.norms(narrow)


def _added(part: pl.DataFrame, found: pl.DataFrame, role: str) -> pl.DataFrame:
    """A side's rounding, added to what the other's is."""
    bound = found.with_columns(own=roundoff.unit("format") * pl.col("norm"))
    own = pl.when(pl.col("slot") == CHANGE).then(pl.col("_own"))
    both = pl.col(COLUMN).fill_null(0.0) + own
    return (
        digested.beside(part, bound, role, "_own")
        .with_columns(pl.when(own.is_not_null()).then(both).otherwise(COLUMN).alias(COLUMN))
        .drop("_own")
    )
