"""Per-token sketches of two runs, joined by sample and by the token's place in it.

``token_sketches/{stage}.parquet`` has a row per token of every block's output, by micro-batch, row
and position. Which sample a row is, and which of its positions are tokens, follows from the key
data of the same micro-batch; so do the samples of packed batches, which are one row. Micro-batches
whose sketches do not fit their key data are left out, and counted.

A model may pass a micro-batch more than once: an engine that is led through a response has it
whole, then the prompt, then a token at a time. Passes meet in their order, and those of one token
go on where the one before ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rlprobe.dumps.key_data import BatchKey, MicroBatch
from rlprobe.sketch import deviation

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
    # how rows lie: masked, ragged or packed
    "layout": pl.String,
    "sample": pl.Int32,
    "token": pl.Int32,
    "digest": pl.String,
    # among the valid tokens of the sample
    "place": pl.Int32,
    "response_at": pl.Int32,
    "appearance": pl.Int32,
}

#: The number of a call in a record's name.
_CALL = r"\.(forward|backward)\.(\d+)\."
MASKED, RAGGED, PACKED = "masked", "ragged", "packed"

#: What says which token of a step it is, in whatever record.
_PLACED = ["step", "digest", "occurrence", "place"]

Batches = Mapping[int, Mapping[BatchKey, MicroBatch]]


@dataclass(frozen=True)
class Tokens:
    """One side's token sketches with their samples."""

    #: The sketches' columns and digest, place, response_at, record, turn and occurrence.
    table: pl.DataFrame
    #: Micro-batches of which nothing tells, or not reliably, what their rows are.
    left_out: int


def positions(batches: Batches) -> pl.DataFrame:
    """Which token of which sample stands at each position of a recorded batch.

    Args:
        batches: micro-batches by step and place.

    Returns:
        Columns :data:`POSITIONS`; every token once for each layout that its batch may have.
    """
    return pl.DataFrame(list(_positions(batches)), schema=POSITIONS, orient="row")


def _positions(batches: Batches) -> Iterator[tuple[Any, ...]]:
    for step, places in batches.items():
        appearance = 0
        for (rank, micro), batch in sorted(places.items()):
            start = 0
            for row, digest in enumerate(batch.samples):
                prompt = batch.prompts[row]
                count = prompt + batch.responses[row]
                layouts: dict[str, tuple[int, Sequence[int]]] = {
                    RAGGED: (row, range(count)),
                    PACKED: (0, range(start, start + count)),
                }
                if batch.valid is not None:
                    layouts[MASKED] = row, np.flatnonzero(batch.valid[row]).tolist()
                for layout, (line, found) in layouts.items():
                    for place, position in enumerate(found):
                        yield (
                            step, rank, micro, layout, line, position,
                            digest, place, prompt, appearance,
                        )  # fmt: skip
                start += count
                appearance += 1


def placed(sketches: pl.DataFrame, batches: Batches) -> Tokens:
    """Tokens with their sample, its occurrence, and the record's name without its call number.

    The call number counts micro-batches, of which the two sides may have different ones; the turn
    is the call's in its own micro-batch, from 0.

    Args:
        sketches: ``token_sketches/{stage}.parquet``.
        batches: micro-batches of the same stage, by step and place.
    """
    key = ["step", "rank", "micro_step"]
    expected = pl.DataFrame(
        [
            (step, rank, micro, layout, rows, width)
            for step, places in batches.items()
            for (rank, micro), batch in places.items()
            for layout, rows, width in _shapes(batch)
        ],
        schema={**dict.fromkeys(key, pl.Int32), "layout": pl.String, "rows": pl.Int32,
                "width": pl.Int32},
        orient="row",
    )  # fmt: skip
    found = shapes(sketches)
    # one sequence alone lies the same in several layouts
    fitting = found.join(expected, on=[*key, "rows", "width"]).unique(key, keep="first")
    table = (
        _turns(sketches)
        .join(fitting.select(*key, "layout"), on=key)
        .join(
            positions(batches),
            left_on=[*key, "layout", "sample", pl.col("token") + pl.col("begins")],
            right_on=[*key, "layout", "sample", "token"],
        )
        .with_columns(occurrence=pl.col("appearance").rank("dense").over("step", "digest") - 1)
    )
    return Tokens(table, found.height - fitting.height)


def _turns(sketches: pl.DataFrame) -> pl.DataFrame:
    """The sketches with their record, and each call's turn and first position in its batch."""
    table = sketches.with_columns(
        record=pl.col("name").str.replace(_CALL, ".${1}."),
        call=pl.col("name").str.extract(_CALL, 2).cast(pl.Int64),
    )
    calls = ["step", "rank", "micro_step", "record"]
    passes = (
        table.group_by(*calls, "call", maintain_order=True)
        .agg(width=pl.col("token").max().cast(pl.Int32) + 1)
        .sort(*calls, "call", maintain_order=True)
        .with_columns(turn=pl.int_range(pl.len(), dtype=pl.Int32).over(calls))
    )
    # a pass of several tokens begins anew, and one after the whole; one of a single token goes on
    whole = pl.col("width") == pl.col("width").max().over("step", "rank", "micro_step")
    anew = (pl.col("width") > 1) | (pl.col("turn") == 0) | whole.shift(1).over(calls)
    passes = passes.with_columns(since=anew.cast(pl.Int32).cum_sum().over(calls)).with_columns(
        begins=pl.when(anew)
        .then(0)
        .otherwise(
            pl.col("width").first().over(*calls, "since")
            + pl.int_range(pl.len(), dtype=pl.Int32).over(*calls, "since")
            - 1
        )
        .cast(pl.Int32)
    )
    known = [*calls, "call"]
    return table.join(
        passes.select(*known, "turn", "begins"), on=known, nulls_equal=True, maintain_order="left"
    )


def shapes(sketches: pl.DataFrame) -> pl.DataFrame:
    """Rows and positions of every micro-batch: step, rank, micro_step, rows, width."""
    return sketches.group_by("step", "rank", "micro_step").agg(
        rows=pl.col("sample").max() + 1, width=pl.col("token").max() + 1
    )


def cut(
    samples: Sequence[tuple[str, int, int]], sizes: Sequence[tuple[int, int, int]]
) -> dict[int, MicroBatch]:
    """Consecutive samples as micro-batches of known sizes; empty where they do not come out.

    Args:
        samples: digest, and tokens of prompt and response, in the order of the stage's batch.
        sizes: micro-step, rows and positions of what the model was given.
    """
    found = {}
    at = 0
    for micro, rows, width in sizes:
        stop = at + rows
        if rows == 1:  # one sequence, or several end to end
            total, stop = 0, at
            while stop < len(samples) and total < width:
                total += samples[stop][1] + samples[stop][2]
                stop += 1
        part = samples[at:stop]
        lengths = [prompt + response for _, prompt, response in part]
        if not part or width != (sum(lengths) if rows == 1 else max(lengths)):
            return {}
        names, prompts, responses = (list(column) for column in zip(*part, strict=True))
        found[micro] = MicroBatch(names, prompts, responses, ragged=True)
        at = stop
    return found if at == len(samples) else {}


def _shapes(batch: MicroBatch) -> Iterator[tuple[str, int, int]]:
    """Layouts that a batch may have had in the model, with their rows and positions."""
    lengths = [p + r for p, r in zip(batch.prompts, batch.responses, strict=True)]
    if batch.valid is not None:
        yield MASKED, len(lengths), int(batch.valid.shape[1])
    # without knowing what the model was given, rows of unequal length may be padded on either side
    if batch.ragged or len(set(lengths)) == 1:
        yield RAGGED, len(lengths), max(lengths, default=0)
    yield PACKED, 1, sum(lengths)


def compare(benchmark: pl.DataFrame, target: pl.DataFrame) -> pl.DataFrame:
    """Join the tokens of both sides (tables of :func:`placed`); columns :data:`SCHEMA`."""
    key = ["step", "record", "digest", "occurrence", "turn", "place"]
    both = benchmark.join(target, on=key, suffix="_target").filter(
        pl.col("sketch").list.len() == pl.col("sketch_target").list.len()
    )
    if both.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    error, width = _distance(both.get_column("sketch"), both.get_column("sketch_target"))
    return (
        both.with_columns(
            error=error,
            error_uncertainty=pl.lit(deviation(width)),
            sample="digest",
            token="place",
            rank_benchmark="rank",
        )
        .select(pl.col(name).cast(kind) for name, kind in SCHEMA.items())
        .sort("step", "order", "sample", "occurrence", "token")
    )


def alone(benchmark: pl.DataFrame, target: pl.DataFrame) -> dict[int, int]:
    """Tokens that one side has and the other has in no record at all, how many by step.

    Args:
        benchmark, target: tables of :func:`placed`.
    """
    sides = [side.select(*_PLACED).unique() for side in (benchmark, target)]
    times = [side.group_by("step", "digest").agg(pl.col("occurrence").max()) for side in sides]
    # replicas of a model have a sample once each, and one side may have more of them
    unlike = (
        times[0]
        .join(times[1], on=["step", "digest"], suffix="_other")
        .filter(pl.col("occurrence") != pl.col("occurrence_other"))
    )
    keys = pl.struct("step", "digest")
    once = keys.is_in(unlike.select(keys).to_series().implode())
    left, right = (
        side.with_columns(occurrence=pl.when(once).then(0).otherwise("occurrence")).unique()
        for side in sides
    )
    lone = pl.concat(
        [one.join(other, on=_PLACED, how="anti") for one, other in ((left, right), (right, left))]
    )
    return dict(sorted(lone.group_by("step").len().iter_rows()))


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
        # not sketch.distances: it sums in another order, and the last bit of a table that is
        # compared with an earlier one is not to change
        distance = np.linalg.norm(t - b, axis=1)
        scale = np.linalg.norm(b, axis=1)
        scale = np.where(scale > 0, scale, np.linalg.norm(t, axis=1))
        error = np.where(distance == 0, 0.0, distance / scale)
    return pl.Series(error).fill_nan(None), b.shape[1]
