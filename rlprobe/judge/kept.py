"""How finely an update's changes are known: the format that weights are kept in between updates.

A change is a difference of weights. Read off weights of 16 bits it is off by up to half a unit in
the last place of the *weight*, at most u |w| an element and update, which is more than most updates
change. Read off fp32 weights, or off fp32 copies that an optimizer steps
(:data:`rlprobe.store.parts.COPIES`), it is off by nothing that matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import polars as pl

from rlprobe.judge import roundoff, unshard
from rlprobe.judge.inputs import Results
from rlprobe.judge.noise_updates import CHANGE
from rlprobe.roles import BENCHMARK, TARGET

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: Of a change: the largest L2 norm of what rounding the weights makes of it, both sides together;
#: null where neither side's weights are of 16 bits or fewer.
COLUMN = "rounding"
_KEY = ["module", "index"]
_SCHEMA = {"rank": pl.Int32, "module": pl.String, "index": pl.String, "size": pl.Int64,
           "format": pl.String, "norm": pl.Float64}  # fmt: skip


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
    return pl.DataFrame(list(_rows(narrow)), schema=_SCHEMA, orient="row")


def _rows(weights: pl.DataFrame) -> Iterator[tuple[object, ...]]:
    """What each rank has of a parameter, and the whole."""
    for (name,), own in weights.group_by("name", maintain_order=True):
        module, _, index = str(name).rpartition(".")
        shards = list(unshard.parameters(own))
        for rank, shard in zip(own.get_column("rank"), shards, strict=True):
            yield rank, module, index, _size(shard.part.local_shape), shard.dtype, shard.norm
        norm = unshard.norm(shards)
        yield None, module, index, _size(shards[0].part.shape), shards[0].dtype, norm


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _added(part: pl.DataFrame, found: pl.DataFrame, role: str) -> pl.DataFrame:
    """A side's rounding, added to what the other's is."""
    bound = found.with_columns(own=roundoff.unit("format") * pl.col("norm"))
    local = bound.filter(pl.col("rank").is_not_null()).select(*_KEY, "rank", "size", local="own")
    whole = bound.filter(pl.col("rank").is_null()).select(*_KEY, whole="own")
    shape = pl.col(f"shape_{role}").list.eval(pl.element().product()).list.first()
    own = pl.when(pl.col("slot") == CHANGE).then(pl.coalesce("local", "whole"))
    both = pl.col(COLUMN).fill_null(0.0) + own
    return (
        part.with_columns(_rank=pl.coalesce(f"rank_{role}", "rank"), _size=shape.fill_null(1))
        .join(
            local,
            left_on=[*_KEY, "_rank", "_size"],
            right_on=[*_KEY, "rank", "size"],
            how="left",
            maintain_order="left",
        )
        .join(whole, on=_KEY, how="left", maintain_order="left")
        .with_columns(pl.when(own.is_not_null()).then(both).otherwise(COLUMN).alias(COLUMN))
        .drop("_rank", "_size", "local", "whole")
    )
