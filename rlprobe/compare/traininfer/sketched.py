"""Tokens of both models by their sketches, where tensors were not dumped.

A run's token sketches cover every block's output. Those of an engine's stage are joined to the
log-prob stage's by sample: the mock proof says which sample each captured request became. Of
generation that is the prompt's forward; of an engine that was led through responses, the prefill of
the whole sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rlprobe import stages
from rlprobe.compare.match.rules import Rules
from rlprobe.compare.samples import run as samples
from rlprobe.compare.samples import sketches
from rlprobe.compare.traininfer.passes import renamed
from rlprobe.dumps import apinames
from rlprobe.dumps.key_data import KeyData
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.errors import StoreError
from rlprobe.sketch import CHOSEN
from rlprobe.store import listing

_REQUEST = ["step", "rank", "micro_step"]


@dataclass(frozen=True)
class Sketched:
    """Tokens joined (columns :data:`rlprobe.compare.samples.sketches.SCHEMA`), and what was not."""

    table: pl.DataFrame
    notes: list[str]
    #: What routers chose, likewise: an error above 0 is another choice.
    choices: pl.DataFrame


def compare(run: Path, rules: Rules, stage: str = stages.GENERATE) -> Sketched | None:
    """Join the tokens of an engine's first pass of each sample to training's; None without
    sketches.

    Args:
        run: its directory.
        rules: which module of the engine is which of training's.
        stage: of :data:`rlprobe.stages.ENGINE_STAGES`.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    tables = [_read(run, name) for name in (stage, stages.LOG_PROB)]
    inference, training = tables
    data = samples.open_side(run)
    if inference is None or training is None or data is None:
        return None
    steps = sorted({*inference.get_column("step").unique(), *training.get_column("step").unique()})
    batches = {step: data.micro_batches(step) for step in steps}
    lengths = {
        sample: (count, count + response)
        for places in batches.values()
        for batch in places.values()
        for sample, count, response in zip(
            batch.samples, batch.prompts, batch.responses, strict=True
        )
    }
    placed = sketches.placed(training, batches)
    notes = []
    if placed.left_out:
        notes.append(
            f"{placed.left_out} micro-batches of the log-prob stage are of another size than their "
            "key data; they are not compared"
        )
    whole = stage == stages.FORCED
    prefill, without = _prefill(inference, _requests(data, steps, stage), lengths, whole=whole)
    if without:
        notes.append(
            f"{without} captured requests have no sample in the mock proof, or not its length; "
            "they are not compared"
        )
    of_routers = pl.col("name").str.ends_with(CHOSEN)
    sides = [
        side.with_columns(record=_record(side.get_column("name"), rules))
        for side in (prefill, placed.table)
    ]
    blocks, choices = (
        sketches.compare(*(side.filter(of_routers == wanted) for side in sides))
        for wanted in (False, True)
    )
    return Sketched(blocks, notes, choices)


def otherwise(choices: pl.DataFrame) -> dict[str, int]:
    """How many tokens are sent to other experts, of how many, by how many routers."""
    return {
        "otherwise": choices.filter(pl.col("error") > 0).height,
        "tokens": choices.height,
        "routers": choices.get_column("name").str.replace(r"\.forward\..*$", "").n_unique(),
    }


def _read(run: Path, stage: str) -> pl.DataFrame | None:
    path = listing.found(run, f"token_sketches/{stage}.parquet")
    if path is None:
        return None
    try:
        return pl.read_parquet(path, glob=False)
    except UNREADABLE as error:
        raise StoreError(f"{path} is not a readable table: {error}") from error


def _requests(data: KeyData, steps: Sequence[int], stage: str) -> pl.DataFrame:
    """The sample of every captured request: columns step, rank, micro_step, digest."""
    rows = [
        (step, rank, number, sample)
        for step in steps
        for rank, order in data.order(stage, step).items()
        for number, sample in enumerate(order)
    ]
    schema = {**dict.fromkeys(_REQUEST, pl.Int32), "digest": pl.String}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _prefill(
    inference: pl.DataFrame,
    requests: pl.DataFrame,
    lengths: Mapping[str, tuple[int, int]],
    *,
    whole: bool,
) -> tuple[pl.DataFrame, int]:
    """Tokens of the first pass of every request, and how many requests are of no known sample."""
    known = pl.DataFrame(
        [
            (sample, prompt, every if whole else prompt)
            for sample, (prompt, every) in lengths.items()
        ],
        schema={"digest": pl.String, "response_at": pl.Int32, "tokens": pl.Int32},
        orient="row",
    )
    first = (
        inference.with_columns(pl.col("name").str.replace(r"\.forward\.\d+\.", ".").alias("plain"))
        .with_columns(number=pl.col("name").str.extract(r"\.forward\.(\d+)\.").cast(pl.Int64))
        .filter(pl.col("number") == pl.col("number").min().over(*_REQUEST, "plain"))
        .with_columns(count=pl.len().over(*_REQUEST, "name"))
    )
    placed = (
        first.join(requests, on=_REQUEST)
        .join(known, on="digest")
        .filter(pl.col("count") == pl.col("tokens"))
    )
    turn = placed.select(*_REQUEST, "digest").unique().sort(*_REQUEST)
    turn = turn.with_columns(
        occurrence=pl.int_range(pl.len(), dtype=pl.UInt32).over("step", "digest")
    )
    found = placed.join(turn, on=[*_REQUEST, "digest"]).with_columns(
        place="token", turn=pl.lit(0, dtype=pl.Int32)
    )
    every = inference.select(_REQUEST).unique().height
    return found, every - turn.height


def _record(names: pl.Series, rules: Rules) -> pl.Series:
    """What a record is on both sides: its module, spelled as the rules have it."""
    api = names.str.replace(r"\.(output|input)\.[^.]*$", "")
    distinct = api.unique(maintain_order=True)  # without, every call has an order of its own
    modules = apinames.parse(distinct.alias("api")).get_column("module").fill_null("")
    spelled = renamed(modules, rules)
    return api.replace_strict(dict(zip(distinct, spelled, strict=True)))
