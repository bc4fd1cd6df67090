"""``RESULTS_DIR/judged/{stage}.parquet``: every recorded quantity, and what judging made of it.

``rlprobe diagnose`` alone writes them; the report, refining and the self-test read them, so that
they cannot say anything else than the diagnosis. A row per record of the comparison, of every
captured step (:data:`SCHEMA`), in order of execution where it was judged, and a row per key data
name (slot ``key_data``, no rank). Of a row holds exactly one:

- ``judged``: it is held against ``floor``; ``beyond`` says that it is no noise. ``excused_by`` may
  name the ground on which its floor is wider than its own;
- ``excused_by``, not ``judged``: it is left out on a known ground (:data:`reasons.EXCUSES`);
- ``unjudged_because``: nothing is said of it (:data:`reasons.UNJUDGED`).

``summary.json`` beside them names the runs and the step, and of each table its digest, size and
rows, where the stage parts, and how its micro-batches hold other samples, if they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rlprobe import files, formats, said, stages
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.dumps.results import Table, vouched
from rlprobe.errors import DumpError
from rlprobe.files import replace_bytes, written
from rlprobe.judge import compared, keydata, reasons, sources
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import key_data
from rlprobe.judge.keydata import Difference
from rlprobe.judge.origin import Origin
from rlprobe.judge.outcomes import ALL_VALUES, Outcome, gradients
from rlprobe.judge.row import Row
from rlprobe.judge.row import first as first_row
from rlprobe.judge.stage import Process, Stage
from rlprobe.roles import BENCHMARK, TARGET

DIRECTORY, SUMMARY = "judged", "summary.json"
FORMAT = 1
KIND = "judged"
KEY_DATA = "key_data"
_AGAIN = "run `rlprobe diagnose RESULTS_DIR` again"
_MAX_BYTES = 64 << 20

_KEYS: dict[str, Any] = {
    "step": pl.Int32, "rank": pl.Int32, "rank_benchmark": pl.Int32, "rank_target": pl.Int32,
    "order": pl.Int64, "name": pl.String, "name_benchmark": pl.String, "name_target": pl.String,
    "module": pl.String, "op": pl.String, "call": pl.Int32, "direction": pl.String,
    "slot": pl.String, "index": pl.String, "status": pl.String, "reason": pl.String,
    "dtype_benchmark": pl.String, "dtype_target": pl.String,
    "shape_benchmark": pl.List(pl.Int64), "shape_target": pl.List(pl.Int64),
    "norm_benchmark": pl.Float64, "norm_target": pl.Float64,
    "error": pl.Float64, "error_kind": pl.String,
}  # fmt: skip
#: Columns of a judged table. ``micro_batch``, ``phase`` and ``update`` are of
#: :mod:`rlprobe.judge.execution`, ``sequence`` its order; null where not judged. Of key data
#: ``count`` is how many values were joined, ``lopsided`` how many are finite on one side, and
#: ``error_kind`` says where error and floor are of one value.
SCHEMA: dict[str, Any] = _KEYS | {
    "floor": pl.Float64, "excess": pl.Float64, "R": pl.Float64, "micro_batch": pl.Int64,
    "phase": pl.Int32, "sequence": pl.Int64, "judged": pl.Boolean, "beyond": pl.Boolean,
    "excused_by": pl.String, "unjudged_because": pl.String,
    "count": pl.Int64, "lopsided": pl.Int64, "update": pl.Int64,
}  # fmt: skip


class First(msgspec.Struct, frozen=True):
    """Where a stage parts: :class:`Origin`, whose row is found in the table by rank and name."""

    kind: str
    module: str | None
    operator: str | None
    reason: str
    rank: int
    name: str
    slot: str


class StageSummary(msgspec.Struct, frozen=True):
    """One stage of ``summary.json``."""

    table: Table
    first: First | None = None
    misplaced: str | None = None
    before_update: int | None = None
    laid_out: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """``summary.json``."""

    step: int
    #: Keys of the runs.
    benchmark: str
    target: str
    stages: dict[str, StageSummary]
    #: How its sentences were made (:mod:`rlprobe.said`), by sentence.
    messages: dict[str, Any] = {}
    format: int = FORMAT


def tables(results: Results, steps: Sequence[Step]) -> dict[str, pl.DataFrame]:
    """The judged table of every stage that was compared, all captured steps.

    Args:
        results: what was compared.
        steps: those that were judged.

    Raises:
        DumpError: a comparison's table is damaged.
    """
    numbers = [step.number for step in steps]
    later = _other_steps_key_data(results, numbers)
    found = {}
    for name in results.stages():
        lazy = compared.scan(results, TARGET, name, list(_KEYS))
        if lazy is None:
            continue
        others = compared.collect(
            lazy.filter(~pl.col("step").is_in(numbers)), results.compared(TARGET, name)
        )
        parts = []
        for step in steps:
            finding = step.findings.get(name)
            if finding is not None:
                parts.append(_table(finding.stage.rows))
        parts.append(_table(others, _later(pl.col("status"))))
        parts += [_key_data_table(step, name, step.findings.get(name)) for step in steps]
        parts.append(_later_key_data(name, later))
        found[name] = pl.concat(parts)
    return found


def _table(rows: pl.DataFrame, because: pl.Expr | None = None) -> pl.DataFrame:
    if because is not None:
        rows = rows.with_columns(judged=pl.lit(False), unjudged_because=because)
    missing = [
        pl.lit(None, kind).alias(name) for name, kind in SCHEMA.items() if name not in rows.columns
    ]
    table = rows.with_columns(missing).select(
        pl.col(name).cast(kind) for name, kind in SCHEMA.items()
    )
    return table.with_columns(pl.col("beyond").fill_null(False))


def _later(status: pl.Expr) -> pl.Expr:
    alone = status.is_in(["benchmark_only", "target_only"])
    return pl.when(alone).then(pl.lit(reasons.NO_PARTNER)).otherwise(pl.lit(reasons.LATER_STEP))


def _key_data_table(step: Step, stage: str, finding: Finding | None) -> pl.DataFrame:
    """Key data as rows: results of the stage are judged, what it was given is not by itself."""
    outcomes = {} if finding is None else {o.name: o for o in (*finding.given, *finding.produced)}
    rows: list[dict[str, Any]] = []
    for name, difference in step.key_data.items():
        if keydata.stage_of(name) != stage:
            continue
        outcome = outcomes.get(name)
        row: dict[str, Any] = {"step": step.number, "name": name, "error": difference.error}
        if outcome is not None:
            row |= {"judged": True, "error": outcome.error, "floor": outcome.floor,
                    "excess": outcome.excess, "beyond": outcome.excess > 1,
                    "count": outcome.count, "lopsided": outcome.lopsided}  # fmt: skip
            if outcome.measure != ALL_VALUES:
                row["error_kind"] = outcome.measure
            if outcome.lopsided:
                row |= {"status": "nonfinite", "reason": outcome.side}
        else:
            row |= {"judged": False, "unjudged_because": _unjudged(difference, stage)}
        rows.append(row)
    rows += [
        {"step": step.number, "name": name, "judged": False, "unjudged_because": because}
        for name, because in sorted(step.absent.items())
        if keydata.stage_of(name) == stage and name not in step.key_data
    ]
    return _key_data_rows(rows)


def _later_key_data(stage: str, later: Mapping[int, list[str]]) -> pl.DataFrame:
    """Key data of the steps that are not judged."""
    return _key_data_rows([
        {"step": number, "name": name, "judged": False, "unjudged_because": reasons.LATER_STEP}
        for number, names in later.items()
        for name in names
        if keydata.stage_of(name) == stage
    ])  # fmt: skip


def _key_data_rows(rows: list[dict[str, Any]]) -> pl.DataFrame:
    table = pl.DataFrame(rows, schema=SCHEMA).with_columns(slot=pl.lit(KEY_DATA))
    return table.with_columns(pl.col("beyond").fill_null(False))


def _unjudged(difference: Difference, stage: str) -> str:
    """Why key data that both sides have are held against nothing."""
    if difference.error is None:
        return reasons.NOT_JOINED
    if difference.name in keydata.CHOICES:
        return reasons.CHOICE
    own = keydata.result_of(difference.name) == stage
    if own and difference.name.endswith(keydata.LATER):
        return reasons.AFTER_UPDATE
    return reasons.NO_FLOOR if own else reasons.GIVEN


def _other_steps_key_data(results: Results, steps: Sequence[int]) -> dict[int, list[str]]:
    """Names of key data at the steps that are not judged."""
    found: dict[int, set[str]] = {}
    step = steps[0]  # of dumps, one is judged
    for source in sources.both(results, step) if results.of_dumps else ():
        for own in () if source is None else source.data.steps():
            if source is not None and own != source.step:
                number = own - source.step + step  # as the benchmark counts
                found.setdefault(number, set()).update(source.data.keys_of(own))
    for run in (results.run(BENCHMARK), results.run(TARGET)):
        for number in () if run is None else run.manifest.steps:
            if number not in steps and run is not None:
                recorded = [*keydata.names(run), *keydata.norms(run)]
                there = {n for n in recorded if keydata.is_there(run, n, number)}
                found.setdefault(number, set()).update(there)
    return {number: sorted(names) for number, names in sorted(found.items())}


def write(results: Results, step: Step, found: Mapping[str, pl.DataFrame]) -> str:
    """Write the tables and, last, their summary.

    Args:
        results: where they go.
        step: the judged step that decides the verdict.
        found: the tables.

    Returns:
        sha256 of the summary, which names the tables' digests.
    """
    directory = results.directory / DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    kept = {}
    for name, table in found.items():
        with written(directory / f"{name}.parquet", durable=True) as path:
            table.write_parquet(path, compression="zstd", metadata=formats.mark(KIND))
            of_file = files.digest(path)
        finding = step.findings.get(name)
        summary = StageSummary(Table(of_file.sha256, of_file.size, table.height))
        if finding is not None:
            summary = msgspec.structs.replace(
                summary,
                first=_first(finding),
                misplaced=finding.stage.misplaced,
                before_update=finding.stage.before_update,
                laid_out=finding.stage.laid_out,
            )
        kept[name] = summary
    for stale in directory.glob("*.parquet"):
        if stale.stem not in kept:
            stale.unlink()
    # dumps are no runs and have no keys
    runs = results.plan.runs
    benchmark, target = (runs[r].key if r in runs else "" for r in (BENCHMARK, TARGET))
    whole = Summary(step.number, benchmark, target, kept)
    plain, messages = said.kept(whole)
    data = (
        msgspec.json.format(msgspec.json.encode(plain | {"messages": messages}), indent=1) + b"\n"
    )
    replace_bytes(directory / SUMMARY, data)
    return hashlib.sha256(data).hexdigest()


def _first(finding: Finding) -> First | None:
    origin = finding.origin
    if origin is None:
        return None
    row = origin.row
    return First(
        origin.kind, origin.module, origin.operator, origin.reason, finding.rank or 0,
        str(row["name"]), str(row.get("slot")),
    )  # fmt: skip


def read(
    results: Results,
    digest: str | None = None,
    rows: Callable[[str], pl.DataFrame] | None = None,
) -> Step:
    """What judging found, from the tables.

    Args:
        results: of an alignment that was diagnosed.
        digest: sha256 of the summary, as the diagnosis names it; None: any.
        rows: gives a stage's table, of which some rows may be left out; None: it is read whole.

    Raises:
        DumpError: there are none, they are damaged, of another version or another diagnosis.
        StoreError: a run is damaged.
    """
    summary = _summary(results.directory / DIRECTORY / SUMMARY, digest)
    step = Step(summary.step)
    passes = {name: stage.before_update for name, stage in summary.stages.items()}
    step.key_data = key_data(results, summary.step, passes)
    for name in sorted(summary.stages, key=stages.order):
        table = read_table(results, name, summary) if rows is None else rows(name)
        own = table.filter(pl.col("step") == summary.step)
        if own.filter(pl.col("slot") != KEY_DATA).is_empty():
            continue  # key data of a stage without records: nothing was found by judging
        step.findings[name] = _finding(name, summary, own, step.key_data)
    return step


def _summary(path: Path, digest: str | None) -> Summary:
    try:
        data = read_bytes(path, _MAX_BYTES)
    except DocumentError as error:
        raise DumpError(
            f"{path} {error}; `rlprobe diagnose RESULTS_DIR` "
            "writes it and the judged tables beside it"
        ) from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise DumpError(f"{path} belongs to another diagnosis than diagnosis.json; {_AGAIN}")
    try:
        raw = msgspec.json.decode(data)
        formats.check(raw.get("format") if isinstance(raw, dict) else None, (FORMAT,), str(path))
        return msgspec.convert(raw, Summary)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is no summary of judged tables: {error}; {_AGAIN}") from error


def read_table(results: Results, stage: str, summary: Summary | None = None) -> pl.DataFrame:
    """The judged table of a stage, all steps.

    Raises:
        DumpError: it is not there, or not the one that the summary names.
    """
    lazy, _ = scan_table(results, stage, summary)
    try:
        return lazy.collect()
    except pl.exceptions.PolarsError as error:
        path = results.directory / DIRECTORY / f"{stage}.parquet"
        raise DumpError(f"{path} is not readable: {error}; {_AGAIN}") from error


def scan_table(
    results: Results, stage: str, summary: Summary | None = None
) -> tuple[pl.LazyFrame, int]:
    """The judged table of a stage, not read yet, and how many rows it has.

    Raises:
        DumpError: as :func:`read_table`.
    """
    directory = results.directory / DIRECTORY
    summary = summary or _summary(directory / SUMMARY, None)
    path = directory / f"{stage}.parquet"
    known = summary.stages.get(stage)
    if known is None:
        raise DumpError(f"{directory / SUMMARY} names no table of {stage}; {_AGAIN}")
    lazy = vouched(path, known.table, KIND, (FORMAT,), f"{SUMMARY} beside it", _AGAIN)
    try:
        schema = lazy.collect_schema()
    except pl.exceptions.PolarsError as error:
        raise DumpError(f"{path} is not readable: {error}; {_AGAIN}") from error
    if schema != pl.Schema(SCHEMA):
        raise DumpError(f"{path} has other columns than this rlprobe writes; {_AGAIN}")
    return lazy, known.table.rows


def _finding(
    name: str, summary: Summary, table: pl.DataFrame, differences: Mapping[str, Difference]
) -> Finding:
    of_key_data = pl.col("slot") == KEY_DATA
    rows = table.filter(~of_key_data)
    held = [
        Outcome(found, error, floor, lopsided, side, count, kind or ALL_VALUES)
        for found, error, floor, lopsided, side, count, kind in table.filter(
            of_key_data & pl.col("judged")
        )
        .select("name", "error", "floor", "lopsided", "reason", "count", "error_kind")
        .iter_rows()
    ]
    handed = [one for one in held if keydata.is_given(one.name) and not one.lopsided]
    produced = [one for one in held if one not in handed]
    known = summary.stages[name]
    stage = Stage(
        name,
        summary.step,
        [Process(int(str(rank)), part, []) for (rank,), part in
         rows.group_by("rank", maintain_order=True)],
        None if known.misplaced is None else said.restored(known.misplaced, summary.messages),
        known.before_update,
        None if known.laid_out is None else said.restored(known.laid_out, summary.messages),
    )  # fmt: skip
    first, origin = known.first, None
    if first is not None:
        own = table.filter(
            (pl.col("name") == first.name)
            & (pl.col("rank").is_null() | (pl.col("rank") == first.rank))
            & (of_key_data | (pl.col("slot") == first.slot))
        )
        row = first_row(own) or Row(name=first.name, slot=first.slot)
        origin = Origin(
            first.kind,
            first.module,
            first.operator,
            row,
            said.restored(first.reason, summary.messages),
        )
    return Finding(
        stage,
        [d for d in differences.values() if keydata.result_of(d.name) == name],
        produced + gradients(rows),
        produced,
        origin,
        None if first is None else first.rank,
        handed,
    )
