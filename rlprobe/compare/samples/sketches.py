"""Per-token sketches of two runs, joined by sample and by the token's place in it.

``token_sketches/{stage}.parquet`` has a row per token of every block's output, by micro-batch, row
and position. Which sample a row is, and which of its positions are tokens, follows from the key
data of the same micro-batch; so do the samples of packed batches, which are one row. Micro-batches
whose sketches do not fit their key data are left out, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rlprobe.compare.samples.keydata import MicroBatch, Place

#: Columns of {stage}/token_sketches.parquet, a row per token and record of both sides.
SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "order": pl.Int32,
    "name": pl.String,
    "sample": pl.String,
    "occurrence": pl.UInt32,
    # over the valid tokens of prompt and response
    "token": pl.Int32,
    # tokens of the prompt: the response begins here
    "response_at": pl.Int32,
    "rank_benchmark": pl.Int32,
    "rank_target": pl.Int32,
    # estimated relative L2 difference, and one standard deviation of it, relative
    "error": pl.Float64,
    "error_uncertainty": pl.Float64,
}

#: Columns of :func:`positions`.
POSITIONS: dict[str, Any] = {
    "step": pl.Int32,
    "rank": pl.Int32,
    "micro_step": pl.Int32,
    # whether rows stand end to end in one
    "packed": pl.Boolean,
    "sample": pl.Int32,
    "token": pl.Int32,
    "digest": pl.String,
    # among the valid tokens of the sample
    "place": pl.Int32,
    "response_at": pl.Int32,
    "appearance": pl.Int32,
}

Batches = Mapping[int, Mapping[Place, MicroBatch]]


@dataclass(frozen=True)
class Tokens:
    """One side's token sketches with their samples."""

    #: The sketches' columns and digest, place, response_at, record and occurrence.
    table: pl.DataFrame
    #: Micro-batches of which nothing tells, or not reliably, what their rows are.
    left_out: int


def positions(batches: Batches) -> pl.DataFrame:
    """Which token of which sample stands at each position of a recorded batch.

    Args:
        batches: micro-batches by step and place.

    Returns:
        Columns :data:`POSITIONS`; every token once as a row of its batch and once as packed.
    """
    return pl.DataFrame(list(_positions(batches)), schema=POSITIONS, orient="row")


def _positions(batches: Batches) -> Iterator[tuple[Any, ...]]:
    for step, places in batches.items():
        appearance = 0
        for (rank, micro), batch in sorted(places.items()):
            start = 0
            for row, digest in enumerate(batch.samples):
                prompt = batch.prompts[row]
                if batch.valid is None:
                    found = list(range(prompt + batch.responses[row]))
                else:
                    found = np.flatnonzero(batch.valid[row]).tolist()
                for place, position in enumerate(found):
                    token = (digest, place, prompt, appearance)
                    yield step, rank, micro, False, row, position, *token
                    yield step, rank, micro, True, 0, start + place, *token
                start += len(found)
                appearance += 1


def placed(sketches: pl.DataFrame, batches: Batches) -> Tokens:
    """Tokens with their sample, its occurrence, and the record's name without its call number.

    The call number counts micro-batches, of which the two sides may have different ones.

    Args:
        sketches: ``token_sketches/{stage}.parquet``.
        batches: micro-batches of the same stage, by step and place.
    """
    key = ["step", "rank", "micro_step"]
    expected = pl.DataFrame(
        [
            (step, rank, micro, len(b.samples), sum(b.prompts) + sum(b.responses), _width(b))
            for step, places in batches.items()
            for (rank, micro), b in places.items()
        ],
        schema=dict.fromkeys((*key, "rows", "tokens", "width"), pl.Int32),
        orient="row",
    )
    shapes = sketches.group_by(key).agg(
        found=pl.col("sample").max() + 1, longest=pl.col("token").max() + 1
    )
    checked = shapes.join(expected, on=key, how="left").with_columns(
        padded=(
            (pl.col("found") == pl.col("rows")) & (pl.col("longest") == pl.col("width"))
        ).fill_null(False),
        packed=((pl.col("found") == 1) & (pl.col("longest") == pl.col("tokens"))).fill_null(False),
    )
    fitting = checked.filter(pl.col("padded") | pl.col("packed"))
    table = (
        sketches.join(fitting.select(*key, packed=~pl.col("padded")), on=key)
        .join(positions(batches), on=[*key, "packed", "sample", "token"])
        .with_columns(
            record=pl.col("name").str.replace(r"\.(forward|backward)\.\d+\.", ".${1}."),
            occurrence=pl.col("appearance").rank("dense").over("step", "digest") - 1,
        )
    )
    return Tokens(table, checked.height - fitting.height)


def _width(batch: MicroBatch) -> int | None:
    """Positions of a row: those of its padding; None where nothing says on which side that is."""
    if batch.valid is not None:
        return int(batch.valid.shape[1])
    lengths = {p + r for p, r in zip(batch.prompts, batch.responses, strict=True)}
    return lengths.pop() if len(lengths) == 1 else None


def compare(benchmark: pl.DataFrame, target: pl.DataFrame) -> pl.DataFrame:
    """Join the tokens of both sides (tables of :func:`placed`); columns :data:`SCHEMA`."""
    key = ["step", "record", "digest", "occurrence", "place"]
    both = benchmark.join(target, on=key, suffix="_target").filter(
        pl.col("sketch").list.len() == pl.col("sketch_target").list.len()
    )
    if both.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    error, width = _distance(both.get_column("sketch"), both.get_column("sketch_target"))
    return (
        both.with_columns(
            error=error,
            error_uncertainty=pl.lit(1 / math.sqrt(2 * width)),
            sample="digest",
            token="place",
            rank_benchmark="rank",
        )
        .select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
        .sort("step", "order", "sample", "occurrence", "token")
    )


def _distance(benchmark: pl.Series, target: pl.Series) -> tuple[pl.Series, int]:
    """Relative L2 distances of sketches of equal length; null where one is not finite."""
    b, t = (
        side.explode(empty_as_null=False, keep_nulls=False)
        .to_numpy()
        .reshape(len(side), -1)
        .astype(np.float64)
        for side in (benchmark, target)
    )
    with np.errstate(all="ignore"):
        distance = np.linalg.norm(t - b, axis=1)
        scale = np.linalg.norm(b, axis=1)
        scale = np.where(scale > 0, scale, np.linalg.norm(t, axis=1))
        error = np.where(distance == 0, 0.0, distance / scale)
    return pl.Series(error).fill_nan(None), b.shape[1]
