"""``rlprobe compare --train-infer``: training log-probs against the engine's prefill."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe.compare import matcher, measures, pairs, writer
from rlprobe.compare import rules as matching
from rlprobe.compare.compare import Options
from rlprobe.compare.rules import Rules
from rlprobe.compare.samples import run as samples
from rlprobe.compare.samples.keydata import KeyData
from rlprobe.compare.sides import Process, Side, StageSource
from rlprobe.compare.tensors import elementwise
from rlprobe.compare.tensors.tensorfile import TensorFileError
from rlprobe.compare.traininfer import sketched
from rlprobe.compare.traininfer.elements import Tokens
from rlprobe.compare.traininfer.passes import Pass, passes
from rlprobe.compare.traininfer.sources import NAME, sources
from rlprobe.compare.traininfer.tokens import Matched, match, with_starts
from rlprobe.compare.writer import Summary
from rlprobe.errors import DumpError, NotComparableError

_log = logging.getLogger(__name__)

TOKEN_SKETCHES = "token_sketches.parquet"


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
    rules = options.rules or matching.load()
    summary = Summary(NAME, NAME, [])
    directory = out / NAME
    joined = sketched.compare(run.path, rules) if engine is None else None
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
        directory.mkdir(parents=True, exist_ok=True)
        joined.table.write_parquet(directory / TOKEN_SKETCHES, compression="zstd")
    sides = _Sides(inference, training, engine is not None, samples.open_side(run.path))
    tables = _tables(sides, rules, options, summary)
    writer.write_stage(directory, tables, summary)
    tensors = pl.scan_parquet(directory / writer.RECORDS).filter(
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


@dataclass(frozen=True)
class _Sides:
    inference: StageSource
    training: StageSource
    #: Whether the engine's dump is one of its own, whose steps are its forward passes.
    apart: bool
    #: The run's key data, None without.
    data: KeyData | None

    def steps(self) -> list[tuple[int, list[Process], list[Process]]]:
        """Step of the training, the engine's processes and the training's."""
        by_step: dict[int, list[Process]] = {}
        for process in self.training.processes:
            by_step.setdefault(process.step, []).append(process)
        if self.apart:
            first = min(by_step)
            return [(first, list(self.inference.processes), by_step[first])]
        return [
            (step, [p for p in self.inference.processes if p.step == step], processes)
            for step, processes in sorted(by_step.items())
        ]


def _tables(
    sides: _Sides, rules: Rules, options: Options, summary: Summary
) -> Iterator[pl.DataFrame]:
    for step, engines, trainers in sides.steps():
        if not engines:
            summary.notes.append(f"step {step}: the engine was not captured")
            continue
        yield from _parameters(sides, engines[0], trainers[0], step, rules, options)
        inference = _passes(sides.inference, engines, rules, options)
        training = _passes(sides.training, trainers, rules, options)
        if sides.data is not None:
            batches = sides.data.micro_batches(step)
            training = [with_starts(p, batches.get((p.process.rank, p.number))) for p in training]
        for name, found, source in (
            ("engine", inference, engines),
            ("training", training, trainers),
        ):
            if not found:
                summary.notes.append(
                    f"step {step}: no token ids in the {name}'s dump of {len(source)} processes "
                    "(they are the embedding's input, in a dump of task tensor)"
                )
        if not (inference and training):
            continue
        matched = match(inference, training)
        known = sum(bool(parts) for parts in matched)
        summary.notes.append(
            f"step {step}: {known} of {len(inference)} forward passes of the engine hold prompt "
            f"tokens that training ran as well ({sum(len(m.span) for p in matched for m in p)} "
            "tokens)"
        )
        for one, parts in zip(inference, matched, strict=True):
            if parts:
                yield _pass_table(one, training, parts, step, rules, options)


def _passes(
    source: StageSource, processes: Sequence[Process], rules: Rules, options: Options
) -> list[Pass]:
    found = []
    for process in processes:
        tensors = source.tensors(process, options.check_crc)
        if tensors is None:
            continue
        try:
            found += passes(process, source.table(process).rows(pairs.LOADED), tensors, rules)
        except TensorFileError as error:
            raise DumpError(
                f"token ids or positions of step {process.step}, rank {process.rank}: {error}"
            ) from error
    return found


def _parameters(
    sides: _Sides, engine: Process, trainer: Process, step: int, rules: Rules, options: Options
) -> Iterator[pl.DataFrame]:
    """The weights that both models ran with."""
    frames = []
    for source, process in ((sides.inference, engine), (sides.training, trainer)):
        frame = (
            source.table(process)
            .rows(pairs.LOADED)
            .filter(
                (pl.col("slot") == "parameters")
                & (pl.col("direction") == "forward")
                & pl.col("module").is_not_null()
            )
        )
        frame = frame.unique(["module", "index"], keep="first", maintain_order=True)
        frames.append(frame.with_columns(call=pl.lit(0, pl.Int32)))
    if any(frame.is_empty() for frame in frames):
        return
    table = _matched(frames[0], frames[1], rules)
    tensors = (
        sides.inference.tensors(engine, options.check_crc),
        sides.training.tensors(trainer, options.check_crc),
    )
    table = elementwise.measure(table, *tensors, options.jobs)
    yield _completed(table, step, engine, trainer)


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
    table = _matched(frames[0], frames[1], rules)
    tokens = Tokens(one, training, parts)
    both = table.with_row_index("row").filter(
        pl.col("shape_benchmark").is_not_null() & pl.col("shape_target").is_not_null()
    )
    rows = both.select(
        "row", "name_benchmark", "name_target", "data_name_benchmark", "data_name_target"
    ).rows(named=True)

    def figures(row: dict[str, Any]) -> dict[str, Any]:
        if row["data_name_benchmark"] is None or row["data_name_target"] is None:
            found = {
                "t_status": measures.SHAPE,
                "t_reason": "not the same tokens, and no tensors that could be cut to them",
                "t_identical": False,
            }
        else:
            found = tokens.figures(row["name_benchmark"], row["name_target"])
        return {**dict.fromkeys(elementwise.RESULT), **found, "row": row["row"]}

    with ThreadPoolExecutor(options.jobs) as pool:
        table = elementwise.applied(table, list(pool.map(figures, rows)), ())
    unlike = (pl.col("status") == measures.MATCHED) & (
        pl.col("dtype_benchmark") != pl.col("dtype_target")
    )
    table = table.with_columns(
        status=pl.when(unlike).then(pl.lit(measures.DTYPE)).otherwise("status"),
        # differences of statistics over other tokens mean nothing
        **{f"{name}_diff": pl.lit(None, pl.Float64) for name in measures.STATISTICS},
    )
    return _completed(table, step, one.process, other.process)


def _matched(benchmark: pl.DataFrame, target: pl.DataFrame, rules: Rules) -> pl.DataFrame:
    found = matcher.match(benchmark, target, rules)
    return measures.measure(pairs.side_by_side(found.benchmark, found.target, found.matches))


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
