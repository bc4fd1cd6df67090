"""Norms of parameters as they were digested when their model entered a stage, beside its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import polars as pl

from rlprobe.judge import unshard

_KEY = ["module", "index"]
_SCHEMA = {"rank": pl.Int32, "module": pl.String, "index": pl.String, "size": pl.Int64,
           "format": pl.String, "norm": pl.Float64}  # fmt: skip


def norms(weights: pl.DataFrame) -> pl.DataFrame:
    """What each rank has of every parameter, and the whole.

    Args:
        weights: rows of ``weights.parquet``, of one stage and step, one a rank and name.

    Returns:
        rank (null: of the whole), module, index, size (elements), format, norm.
    """
    return pl.DataFrame(list(_rows(weights)), schema=_SCHEMA, orient="row")


def _rows(weights: pl.DataFrame) -> Iterator[tuple[object, ...]]:
    for (name,), own in weights.group_by("name", maintain_order=True):
        module, _, index = str(name).rpartition(".")
        shards = list(unshard.parameters(own))
        for rank, shard in zip(own.get_column("rank"), shards, strict=True):
            size = math.prod(shard.part.local_shape)
            yield rank, module, index, size, shard.dtype, shard.norm
        whole = math.prod(shards[0].part.shape)
        yield None, module, index, whole, shards[0].dtype, unshard.norm(shards)


def beside(part: pl.DataFrame, found: pl.DataFrame, role: str, name: str) -> pl.DataFrame:
    """Rows with a number of their parameter: the rank's where the row is of its shard, else the
    whole's.

    Args:
        part: rows of compare.
        found: of :func:`norms`, with a column ``own``.
        role: whose shapes and ranks say what a row is of.
        name: of the column that is added; null where nothing is known.
    """
    local = found.filter(pl.col("rank").is_not_null()).select(*_KEY, "rank", "size", _local="own")
    whole = found.filter(pl.col("rank").is_null()).select(*_KEY, _whole="own")
    shape = pl.col(f"shape_{role}").list.eval(pl.element().product()).list.first()
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
        .with_columns(pl.coalesce("_local", "_whole").alias(name))
        .drop("_rank", "_size", "_local", "_whole")
    )
