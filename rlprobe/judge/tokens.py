"""Where along the sequence a block's outputs part, from token sketches joined by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.compare.samples.sketches import SCHEMA
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.dumps.results import TOKEN_SKETCHES
from rlprobe.errors import DumpError
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import change_point
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.stages import ENGINE_STAGES

#: The number of a call in a record's name.
_CALL = r"\.forward\.(\d+)"
#: Sequences of fewer tokens have no first, last and others to speak of.
_SHORTEST = 4
#: A token stands out from this share of its sample's largest error on.
_SHARE = 0.1


def where(
    results: Results, stage: str, step: int, rank: int | None, order: int
) -> tuple[str, int | None] | None:
    """Where the first block from a record on parts most; None where no sketches tell.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        rank: the benchmark's process; None for all of them.
        order: execution order of the record in question on the benchmark.

    Returns:
        The sample, and the first token of its response that stands out; None for the token where
        it is one of the prompt.

    Raises:
        DumpError: the table is damaged.
    """
    block = _from(_tokens(results, stage, step, rank), order)
    if block is None:
        return None
    worst = block.sort("error", descending=True, nulls_last=True).row(0, named=True)
    own = block.filter(
        (pl.col("sample") == worst["sample"])
        & (pl.col("occurrence") == worst["occurrence"])
        & (pl.col("error") >= _SHARE * worst["error"])
    ).sort("token")
    token, response_at = own.select("token", "response_at").row(0)
    return worst["sample"], token - response_at if token >= response_at else None


#: A rank whose tokens differ by so much more than those of all others is the one that has them so.
_ALONE = 10.0


def lone_rank(results: Results, stage: str, step: int, order: int) -> int | None:
    """The target's rank on which alone tokens differ, in the first block from a record on.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        order: execution order of the record in question on the benchmark.

    Returns:
        None where tokens of several ranks differ, where one alone has any, and where none tell.

    Raises:
        DumpError: the table is damaged.
    """
    tokens = _tokens(results, stage, step, None)
    block = _from(tokens, order)
    if tokens is None or block is None:
        return None
    # a rank has the same block in its own micro-batches
    own = pl.col("name").str.replace(_CALL, "")
    tokens = tokens.filter(own == block.select(own).item(0, 0))
    errors = tokens.group_by("rank_target").agg(pl.col("error").median()).drop_nulls().sort("error")
    if errors.height < 2:
        return None
    most, next_ = errors.item(-1, "error"), errors.item(-2, "error")
    return int(errors.item(-1, "rank_target")) if most > _ALONE * next_ else None


def first_block(
    results: Results, stage: str, step: int, floors: pl.DataFrame
) -> tuple[str, float] | None:
    """The first block whose tokens differ beyond its floor, whatever ranks they were on.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        floors: name and floor of the stage's records.

    Returns:
        The record's name and the median of its tokens' errors; None where no sketches tell.

    Raises:
        DumpError: the table is damaged.
    """
    tokens = _tokens(results, stage, step, None)
    if tokens is None:
        return None
    blocks = (
        tokens.group_by("name")
        .agg(pl.col("order").min(), pl.col("error").median())
        .join(floors.group_by("name").agg(pl.col("floor").max()), on="name")
        .filter(pl.col("error") > pl.col("floor"))
        .sort("order")
    )
    if blocks.is_empty():
        return None
    name, error = blocks.select("name", "error").row(0)
    return str(name), float(error)


def errors(results: Results, stage: str, step: int) -> pl.DataFrame | None:
    """The largest error of any token of each record; None where no tokens were sketched.

    Columns ``name``, ``rank`` (the target's), ``error``, relative to the token's own norm, and
    ``odd``: how many tokens are not finite on a side, which have none.

    Raises:
        DumpError: the table is damaged.
    """
    tokens = _tokens(results, stage, step, None)
    if tokens is None:
        return None
    return tokens.group_by("name", rank="rank_target").agg(
        pl.col("error").max(), odd=pl.col("error").null_count()
    )


def lacking(results: Results, stage: str, step: int) -> pl.DataFrame | None:
    """Records in which tokens of a sample are not joined that others of its records have.

    Every block of a pass has the same tokens, whatever the layout and however often it is run
    again; only what one side lacks is joined in one block and not in the next.

    Returns:
        Columns ``name`` and ``lost``, how many tokens; None where no tokens were sketched.

    Raises:
        DumpError: the table is damaged.
    """
    tokens = _tokens(results, stage, step, None)
    if tokens is None:
        return None
    sample = ["sample", "occurrence"]
    of_record = pl.col("name").str.replace(_CALL, "").alias("record")
    found = (
        tokens.group_by(*sample, of_record, maintain_order=True)
        .agg(pl.col("name").first(), held=pl.col("token").n_unique())
        .with_columns(lost=pl.col("held").max().over(sample).cast(pl.Int64) - pl.col("held"))
    )
    return found.filter(pl.col("lost") > 0).select("name", "lost")


def alone(results: Results, stage: str, step: int, *, alike: bool) -> int:
    """How many tokens one side has that the other has in no record of a stage.

    Not of what an engine is led through: what it has cached it does not run again.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        alike: both sides hold the same samples in the same places. Where they do not, a
            micro-batch that is padded to another size could not be joined, and lacks nothing.

    Raises:
        DumpError: the comparison is damaged.
    """
    summary = results.summary(TARGET, stage)
    found = None if summary is None or summary.samples is None else summary.samples.token_sketches
    if stage in ENGINE_STAGES or found is None or (found.left_out and not alike):
        return 0
    return found.alone.get(str(step), 0)


def of_calls(results: Results, stage: str, step: int) -> pl.DataFrame | None:
    """What the tokens of every block's call differ by, where every token of the step is known.

    Columns ``rank_benchmark``, ``name``, ``tokens`` (how many), ``positions`` (how many its output
    has, padding with them), ``together`` (root mean square of the tokens' errors) and ``largest``.

    None where a side has no sketches or does not say which tokens its samples have, where a block
    was not sketched at each of them once, or where a token is not finite.

    Raises:
        DumpError, StoreError: a table is damaged.
    """
    tokens = _tokens(results, stage, step, None)
    sides = [results.run(role) for role in (BENCHMARK, TARGET)]
    if tokens is None or tokens.is_empty() or tokens.get_column("error").null_count():
        return None
    blocks = tokens.group_by(pl.col("name").str.replace(_CALL, "")).len().get_column("len")
    positions = []
    for run in sides:
        sketched = None if run is None else run.token_sketches(stage)
        batches = {} if run is None or run.recorded is None else run.recorded.micro_batches(step)
        every = sum(sum(b.prompts) + sum(b.responses) for b in batches.values())
        if sketched is None or (blocks != every).any():
            return None
        positions.append(sketched.filter(pl.col("step") == step).group_by("rank", "name").len())
    if positions[0].height != positions[1].height:
        return None
    called = tokens.group_by("rank_benchmark", "name").agg(
        tokens=pl.len(),
        together=pl.col("error").pow(2).mean().sqrt(),
        largest=pl.col("error").max(),
    )
    held = positions[0].select("name", rank_benchmark="rank", positions="len")
    return called.join(held, on=["rank_benchmark", "name"])


#: A token agrees up to this share of the largest error of any: tokens that were given the same and
#: computed alike differ by round-off, if at all.
_AGREES = 1e-3
#: Of tokens that differ and are this share of all, others are spared.
_FEW = 0.5


@dataclass(frozen=True)
class Few:
    """Tokens of a few neighbouring positions that alone differ, all others agreeing."""

    #: The first and the last position.
    first: int
    last: int
    #: In how many sequences any of them does, and of how many.
    sequences: int
    of: int
    #: Root mean square of their errors, each relative to the token's own norm.
    size: float


@dataclass(frozen=True)
class Profile:
    """How a block's error lies along its sequences, over all samples of the micro-batches.

    What happens in a block before any other token sees it is here alone: results of a stage have
    been through the blocks above as well, which spread a difference over later tokens.
    """

    #: Root mean square error of first and of last tokens, over that of the tokens between.
    first: float
    last: float
    #: Position from which on tokens differ far more than before it; None where they always do.
    onset: int | None
    #: None where tokens differ all along their sequences.
    few: Few | None = None


def few(lines: Sequence[npt.NDArray[np.float64]]) -> Few | None:
    """The few neighbouring tokens that alone differ; None where others do as well.

    Args:
        lines: errors of each sequence's tokens.
    """
    peak = max((float(line.max()) for line in lines if line.size), default=0.0)
    apart = [np.flatnonzero(line > _AGREES * peak) for line in lines]
    if not any(own.size for own in apart):
        return None
    first = min(int(own[0]) for own in apart if own.size)
    last = max(int(own[-1]) for own in apart if own.size)
    within = sum(min(len(line), last + 1) - min(len(line), first) for line in lines)
    if within > _FEW * sum(len(line) for line in lines):
        return None
    differing = np.concatenate([line[own] for line, own in zip(lines, apart, strict=True)])
    return Few(
        first,
        last,
        sum(own.size > 0 for own in apart),
        len(lines),
        float(np.sqrt(np.mean(differing**2))),
    )


def profile(
    results: Results,
    stage: str,
    step: int,
    rank: int | None,
    order: int,
    passes: int | None = None,
) -> Profile | None:
    """The profile of the first block from a record on; None where no sketches tell of every token.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        rank: the benchmark's process; None for all of them.
        order: execution order of the record in question on the benchmark.
        passes: micro-batches of the stage to look at: those before weights change. None for all.

    Raises:
        DumpError: the table is damaged.
    """
    tokens = _tokens(results, stage, step, rank)
    block = _from(tokens, order)
    if tokens is None or block is None:
        return None
    # the same block in every micro-batch: two sequences alone say little
    tokens = tokens.with_columns(
        record=pl.col("name").str.replace(_CALL, ""),
        micro_batch=pl.col("name").str.extract(_CALL).cast(pl.Int64),
    )
    block = tokens.filter(
        (pl.col("record") == block.get_column("name").str.replace(_CALL, "").first())
        & (True if passes is None else pl.col("micro_batch") < passes)
    )
    lines = [
        np.array(errors, dtype=np.float64)
        for (errors,) in block.sort("token")
        .group_by("micro_batch", "sample", "occurrence", maintain_order=True)
        .agg("error")
        .select("error")
        .iter_rows()
    ]
    lines = [line for line in lines if len(line) > _SHORTEST]
    # a token that is not finite has no error, and is not one that agrees
    if not lines or not all(np.isfinite(line).all() for line in lines):
        return None
    between = _together([error for line in lines for error in line[1:-1]])
    alone = few(lines)
    if not between > 0 and alone is None:
        return None
    first, last = (_together([line[at] for line in lines]) for at in (0, -1))
    return Profile(_over(first, between), _over(last, between), change_point(lines), alone)


def _together(errors: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def _over(error: float, between: float) -> float:
    """How many times the error of the tokens between: infinite where these agree."""
    if between > 0:
        return error / between
    return float("inf") if error > 0 else 0.0


def _tokens(results: Results, stage: str, step: int, rank: int | None) -> pl.DataFrame | None:
    """All tokens of a stage, or those of one of the benchmark's processes."""
    path = results.compared(TARGET, stage) / TOKEN_SKETCHES
    lazy = results.table(TARGET, stage, TOKEN_SKETCHES)
    if lazy is None:
        return None
    try:
        table = lazy.select(list(SCHEMA)).collect()
    except UNREADABLE as error:
        raise DumpError(f"{path} is not readable: {error}; compare again") from error
    table = table.filter(pl.col("step") == step)
    return table if rank is None else table.filter(pl.col("rank_benchmark") == rank)


def _from(tokens: pl.DataFrame | None, order: int) -> pl.DataFrame | None:
    """Tokens of the first block output from a record on that differs; None where none does."""
    if tokens is None:
        return None
    later = tokens.filter((pl.col("order") >= order) & (pl.col("error") > 0))
    if later.is_empty():
        return None
    return tokens.filter(pl.col("order") == later.get_column("order").min())
