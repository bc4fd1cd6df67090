"""``rlprobe compare --train-infer``: training log-probs against the engine's prefill."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe import stages
from rlprobe.compare import measures, writer
from rlprobe.compare.compare import Options
from rlprobe.compare.match import rules as packaged
from rlprobe.compare.match.rules import Rules
from rlprobe.compare.samples import run as samples
from rlprobe.compare.sides import Side
from rlprobe.compare.stage_sources import Process
from rlprobe.compare.tensors import elementwise
from rlprobe.compare.traininfer import counterparts, fused, parameters, shards, sketched
from rlprobe.compare.traininfer.elements import Tokens
from rlprobe.compare.traininfer.matching import halves, matched
from rlprobe.compare.traininfer.passes import Pass
from rlprobe.compare.traininfer.sources import NAME, sources
from rlprobe.compare.traininfer.steps import Sides, steps
from rlprobe.compare.traininfer.tokens import Matched, match
from rlprobe.compare.writer import Summary
from rlprobe.dumps.results import RECORDS, TOKEN_SKETCHES
from rlprobe.errors import NotComparableError
from rlprobe.said import Said, say

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was compared."""

    summary: Summary
    #: Records of activations that were measured, and tokens by their sketches.
    activations: int
    tokens: int

    def insufficient(self) -> NotComparableError | None:
        """Why nothing can be said of training against inference; None where something can."""
        if self.activations or self.tokens:
            return None
        return NotComparableError(
            "no activation of training and inference was compared: "
            + "; ".join(self.summary.notes or ["they have no record in common"])
            + ". Statistics of a whole batch cannot be cut to the prompt's tokens: capture both "
            "stages with token_sketch: true (engine light), or with engine: msprobe and task: "
            "tensor"
        )


def compare(run: Side, engine: Side | None, out: Path, options: Options) -> Outcome:
    """Compare the prompt tokens of both models and write ``out/train_infer/``.

    The engine is the benchmark, training the target. What was compared is not judged here, see
    :meth:`Outcome.insufficient`.

    Raises:
        NotComparableError: a stage is missing.
        DumpError, StoreError: a file is damaged.
    """
    inference, training = sources(run, engine)
    rules = options.rules or packaged.load()
    summary = Summary(NAME, NAME, [])
    directory = out / NAME
    led = stages.FORCED if stages.FORCED in run.stages else stages.GENERATE
    joined = sketched.compare(run.path, rules, led) if engine is None else None
    if joined is not None:
        error = joined.table.get_column("error")
        summary.samples = {
            "keys": {},
            "token_sketches": {
                "tokens": joined.table.height,
                "max_error": error.filter(error.is_finite()).max(),
            },
            "notes": joined.notes,
        }
        writer.write_table(directory, TOKEN_SKETCHES, joined.table, summary)
        if joined.choices.height:
            otherwise = sketched.otherwise(joined.choices)
            summary.samples["routing"] = otherwise
            summary.notes.append(
                say(
                    "{otherwise} of {tokens} choices of experts are others in the engine than in "
                    "training ({routers} routers)",
                    **otherwise,
                )
            )
    sides = Sides(
        inference,
        training,
        engine is not None,
        samples.open_side(run.path),
        rules,
        options.check_crc,
    )
    tables = _tables(sides, rules, options, summary)
    writer.write_stage(directory, tables, summary)
    tensors = pl.scan_parquet(directory / RECORDS, glob=False).filter(
        (pl.col("slot") != "parameters") & (pl.col("error_kind") == measures.TENSOR)
    )
    count = int(tensors.select(pl.len()).collect().item())
    return Outcome(summary, count, 0 if joined is None else joined.table.height)


def tell(outcome: Outcome) -> None:
    """Say what was found."""
    for note in outcome.summary.notes:
        _log.info("%s", note)
    summary = outcome.summary
    _log.info(
        "%d records compared (%d of activations), largest relative difference %s; %d tokens by "
        "their sketches, largest %s",
        summary.compared,
        outcome.activations,
        _said(summary.max_error),
        outcome.tokens,
        _said(((summary.samples or {}).get("token_sketches") or {}).get("max_error")),
    )


def _said(error: float | None) -> str:
    return "-" if error is None else f"{error:.3g}"


def _tables(
    sides: Sides, rules: Rules, options: Options, summary: Summary
) -> Iterator[pl.DataFrame]:
    alone: dict[Said, None] = {}
    for step in steps(sides, summary.notes):
        if not step.engines:
            summary.notes.append(say("step {step}: the engine was not captured", step=step.number))
            continue
        for engine in _one_a_rank(step.engines):
            trainer = step.trainers[0]
            weights = parameters.compare(
                (sides.inference, engine), (sides.training, trainer), rules, options
            )
            if weights is not None:
                yield _completed(weights, step.number, engine, trainer)
        for name, found, source in (
            (say("engine"), step.inference, step.engines),
            (say("training"), step.training, step.trainers),
        ):
            if not found:
                summary.notes.append(
                    say(
                        "step {step}: no token ids in the {name}'s dump of {count} processes (they "
                        "are the embedding's input, in a dump of task tensor)",
                        step=step.number,
                        name=name,
                        count=len(source),
                    )
                )
        if not (step.inference and step.training):
            continue
        same = match(step.inference, step.training)
        known = sum(bool(parts) for parts in same)
        summary.notes.append(
            say(
                "step {step}: {known} of {all} forward passes of the engine hold tokens that "
                "training ran as well ({prompts} tokens of prompts, {generated} generated ones)",
                step=step.number,
                known=known,
                all=len(step.inference),
                prompts=_count(same, False),
                generated=_count(same, True),
            )
        )
        for one, parts in zip(step.inference, same, strict=True):
            if parts:
                table = _pass_table(one, step.training, parts, step.number, rules, options)
                alone |= dict.fromkeys(counterparts.lacking(table))
                yield table
    summary.notes += alone


def _count(same: Sequence[Sequence[Matched]], decoded: bool) -> int:
    return sum(len(m.span) for p in same for m in p if m.decoded == decoded)


def _one_a_rank(processes: Sequence[Process]) -> list[Process]:
    """The first process of every rank: an engine's own dump has a step for every pass."""
    return list({p.rank: p for p in reversed(processes)}.values())[::-1]


def _pass_table(
    one: Pass,
    training: Sequence[Pass],
    parts: Sequence[Matched],
    step: int,
    rules: Rules,
    options: Options,
) -> pl.DataFrame:
    """All records of one engine pass against the first training pass that has its tokens."""
    other = training[min(part.training for part in parts)]
    # of tensors only: a flag such as use_cache differs by design
    activations = (pl.col("slot") != "parameters") & pl.col("shape").is_not_null()
    frames = [
        p.records.filter(activations).with_columns(call=pl.lit(0, pl.Int32)) for p in (one, other)
    ]
    described = fused.describe(frames[0])
    table = matched(described.records, frames[1], rules)
    both = table.with_row_index("row").filter(
        pl.col("shape_benchmark").is_not_null() & pl.col("shape_target").is_not_null()
    )
    tokens = Tokens(
        one, training, parts, shards.ranks(_widths(both, one, other)), halves(rules), described
    )
    rows = both.select(
        "row", "name_benchmark", "name_target", "data_name_benchmark", "data_name_target"
    ).rows(named=True)

    def figures(row: dict[str, Any]) -> dict[str, Any]:
        if row["data_name_benchmark"] is None or row["data_name_target"] is None:
            found = elementwise.unmeasured(
                measures.SHAPE, "not the same tokens, and no tensors that could be cut to them"
            )
        else:
            found = tokens.figures(row["name_benchmark"], row["name_target"])
        return {**dict.fromkeys(elementwise.RESULT), **found, "row": row["row"]}

    with ThreadPoolExecutor(options.jobs) as pool:
        table = elementwise.applied(table, list(pool.map(figures, rows)), ())
    unlike = (pl.col("status") == measures.MATCHED) & (
        pl.col("dtype_benchmark") != pl.col("dtype_target")
    )
    # token ids and positions are counted in whatever integers are wide enough
    counts = pl.all_horizontal(
        pl.col(f"dtype_{side}").str.starts_with("torch.int") for side in ("benchmark", "target")
    )
    unlike &= ~counts.fill_null(False)
    table = table.with_columns(
        status=pl.when(unlike).then(pl.lit(measures.DTYPE)).otherwise("status"),
        # differences of statistics over other tokens mean nothing
        **{f"{name}_diff": pl.lit(None, pl.Float64) for name in measures.STATISTICS},
    )
    apart = matched(described.apart.drop("why"), frames[1].clear(), rules)
    apart = apart.with_columns(reason=described.apart.get_column("why"))
    table = pl.concat([writer.completed(table), writer.completed(apart)])
    return _completed(table, step, one.process, other.process)


def _widths(both: pl.DataFrame, one: Pass, other: Pass) -> list[tuple[int, int]]:
    """Values a token of records that tell whether the engine is divided, in both models."""
    rows = both.select("name_benchmark", "shape_benchmark", "shape_target").iter_rows()
    counts = [p.grid.rows * p.grid.length for p in (one, other)]
    sizes = [[math.prod(s) for s in shapes] for name, *shapes in rows if shards.says_ranks(name)]
    return [
        (left // counts[0], right // counts[1])
        for left, right in sizes
        if not (left % counts[0] or right % counts[1])
    ]


def _completed(table: pl.DataFrame, step: int, one: Process, other: Process) -> pl.DataFrame:
    ranks = {
        f"rank_{side}": pl.when(pl.col(f"order_{side}").is_not_null()).then(
            pl.lit(process.rank, pl.Int32)
        )
        for side, process in (("benchmark", one), ("target", other))
    }
    table = table.with_columns(
        step=pl.lit(step, pl.Int32), rank=pl.lit(one.rank, pl.Int32), **ranks
    )
    return writer.completed(table)
