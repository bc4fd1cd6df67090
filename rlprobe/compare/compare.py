"""The comparison of two sides: plan, then match, measure and write stage by stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from rlprobe import files, stages
from rlprobe.compare import insufficiency, loading, measures, planner, writer
from rlprobe.compare.early import COVERAGE
from rlprobe.compare.match import pairs, shift
from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.compare.sides import KEY_DATA, Side
from rlprobe.compare.stage_sources import RolloutStage
from rlprobe.compare.tables import Table
from rlprobe.compare.unchanged import Unchanged
from rlprobe.compare.writer import Summary
from rlprobe.errors import NotComparableError
from rlprobe.imports import uncollected
from rlprobe.said import exactly, of_side, say
from rlprobe.stages import ALIASES
from rlprobe.store import listing
from rlprobe.terminal import counted

if TYPE_CHECKING:
    from rlprobe.compare.match.rules import Rules
    from rlprobe.compare.samples.run import Samples

_log = logging.getLogger(__name__)

#: The pair whose sides run in unlike precision by intent.
OTHER_PRECISION = "high_precision"
#: Records measured at a time where each row stands for itself: enough to keep the cores busy,
#: few enough that memory is used again instead of asked for.
_SLICE = 1 << 17


@dataclass(frozen=True)
class Options:
    """How to compare."""

    #: What the pair is called in the results (target, repeat, …).
    pair: str = "target"
    stages: tuple[str, ...] = ()
    coverage: float = COVERAGE
    #: Threads that read tensors.
    jobs: int = 1
    #: Check the CRC-32 of every tensor file that is read.
    check_crc: bool = False
    #: Fills in the round-off bound and the ratio to it; None leaves them null (diagnose does it in
    #: any case).
    noise: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    #: How records of different names are matched; None for the packaged rules.
    rules: Rules | None = None
    #: The target's step for steps of the benchmark, see :func:`planner.plan`.
    map_steps: Mapping[int, int] = field(default_factory=dict)
    #: A process that dump files can be decoded in beside this one, where one has started already.
    beside: Executor | None = None
    #: Key data of both sides where they have been opened already.
    samples: Samples | None = None
    #: Whether figures are told; those of a comparison that is a part of something else are not.
    told: bool = True


def compare(benchmark: Side, target: Side, out: Path, options: Options) -> list[Summary]:
    """Compare two sides and write ``out/{stage}/{records.parquet, summary.json}``.

    Raises:
        NotComparableError: they have no stage in common; the files say so. Too small a coverage is
            *not* raised here (:mod:`.insufficiency` is asked): the results are wanted all the same.
        DumpError, StoreError: a side is damaged.
    """
    samples = _samples(benchmark, target, options)
    more = [] if samples is None or options.stages else samples.stages()
    try:
        plan = planner.plan(benchmark, target, options.stages, options.map_steps)
    except NotComparableError as error:
        if not more:
            _write_nothing(benchmark, target, out, options, str(error))
            raise
        plan = []
    planned = {stage.stage for stage in plan}
    plan += [_of_key_data(stage) for stage in more if stage not in planned]
    summaries: list[Summary] = []
    of = _of(benchmark, target)
    for stage in sorted(plan, key=lambda one: stages.order(one.stage)):
        summary = Summary(options.pair, stage.stage, list(stage.notes), of=of)
        if samples is not None and samples.lone and not summaries:
            summary.notes.append(
                say(
                    "key data are on the {side} only, and were not compared",
                    side=of_side(samples.lone),
                )
            )
        summary.across_dtypes = options.pair == OTHER_PRECISION
        unchanged = Unchanged(len(stage.pairings))
        tables = _tables(stage, options, summary, unchanged)
        if samples is not None:
            found = samples.compare(stage.stage, tuple(map(str, stage.notes)))
            if found is not None:
                summary.samples = found.summary
                for name, table in found.tables.items():
                    writer.write_table(out / stage.stage, name, table, summary)
        writer.write_stage(out / stage.stage, tables, summary, unchanged)
        _tell(summary, logging.INFO if options.told else logging.DEBUG)
        summaries.append(summary)
    return summaries


def _of_key_data(stage: str) -> StagePlan:
    """A stage of which both sides have key data and no records in common."""
    note = say("compared are its key data: no records in common")
    return StagePlan(stage, None, None, (), (note,))


def _write_nothing(
    benchmark: Side, target: Side, out: Path, options: Options, message: str
) -> None:
    """Empty results of every stage that was to be compared, for whatever reads them next."""
    empty = pl.DataFrame(schema=writer.SCHEMA)
    wanted = [ALIASES.get(name, name) for name in options.stages]
    for stage in wanted or dict.fromkeys([*benchmark.stages, *target.stages]):
        summary = Summary(options.pair, stage, [exactly(message)], of=_of(benchmark, target))
        writer.write_stage(out / stage, [empty], summary)


def _of(benchmark: Side, target: Side) -> dict[str, dict[str, str]]:
    """Which runs are compared, for whoever must know that they are still the same."""
    found = {}
    for name, side in (("benchmark", benchmark), ("target", target)):
        path = side.path / listing.MANIFEST
        if path.is_file():
            key, digest = listing.key(side.path), files.digest(path).sha256
            found[name] = {"key": key, "manifest": digest}
    return found


def _samples(benchmark: Side, target: Side, options: Options) -> Samples | None:
    """Key data of both sides; None where neither has any."""
    if options.samples is not None:
        return options.samples
    if not any(map(_has_key_data, (benchmark, target))):
        return None
    # Imported here: plain dumps seldom have key data, and numpy's import is felt.
    from rlprobe.compare.samples.run import Samples

    return Samples(benchmark.path, target.path, options.map_steps)


def _has_key_data(side: Side) -> bool:
    if (side.path / listing.MANIFEST).is_file():  # what is gone since must be missed
        return any(name.startswith("dump/data/") for name in listing.listed(side.path))
    return any((side.path / directory).is_dir() for directory in KEY_DATA)


def _tell(summary: Summary, level: int) -> None:
    """How much was compared, and what was found of key data and token sketches."""
    if summary.of_key_data_alone:
        _log.log(level, "%s: key data alone, no records", summary.stage)
    else:
        _log.log(level, "%s: %s", summary.stage, _compared(summary))
    if summary.checksums["compared"]:
        _log.log(level, "%s: %s", summary.stage, insufficiency.checksums(summary))
    if summary.samples is None:
        return
    for key, found in summary.samples["keys"].items():
        _log.log(
            level,
            "%s: %s: %s joined, %d identical%s, largest relative difference %s",
            summary.stage,
            key,
            counted(found["matched"], "sample"),
            found["identical"],
            "".join(f", {found[what]:,} {words}" for what, words in _APART if found[what]),
            "-" if found["max_error"] is None else f"{found['max_error']:.3g}",
        )
    tokens = summary.samples["token_sketches"]
    if tokens is not None:
        joined = counted(tokens["tokens"], "token sketch", "token sketches")
        _log.log(level, "%s: %s joined by sample", summary.stage, joined)
    for note in summary.samples["notes"]:
        _log.warning("%s: %s", summary.stage, note)


def _compared(summary: Summary) -> str:
    """How many records, and how much of each side they are."""
    unseen = f", no difference seen in {summary.unseen}" if summary.unseen else ""
    shares = " / ".join(f"{100 * summary.coverage(side):.1f} %" for side in summary.records)
    return (
        f"{counted(summary.compared, 'record')} compared, {summary.identical} identical{unseen}, "
        f"coverage {shares}"
    )


#: Rows of key data that no difference is told of, and why.
_APART = (
    ("nonfinite", "not finite"),
    ("shape", "of another length"),
    ("benchmark_only", "on the benchmark only"),
    ("target_only", "on the target only"),
)


def _one_sided(stage: StagePlan, pairing: Pairing, mapped: bool) -> str | None:
    """Why a process has no counterpart; None where it has one.

    Args:
        stage, pairing: where it is.
        mapped: steps are compared with those of other numbers, as it was asked for.
    """
    if pairing.benchmark is not None and pairing.target is not None:
        return None
    side, other = ("target", "benchmark") if pairing.target is None else ("benchmark", "target")
    if getattr(stage, side) is None:
        return f"{insufficiency.NO_PROCESS[0 if side == 'benchmark' else 1]}stage {stage.stage}"
    if mapped and getattr(pairing, other) in [getattr(p, side) for p in stage.pairings]:
        step = getattr(pairing, other).step
        return f"{insufficiency.MAPPED_AWAY}step {step} of the {other} without a partner"
    there = any(getattr(p, side) is not None for p in stage.pairings if p.step == pairing.step)
    what = f"rank {pairing.rank} of step {pairing.step}" if there else f"step {pairing.step}"
    return f"{insufficiency.NO_PROCESS[0 if side == 'benchmark' else 1]}{what}"


def _tables(
    stage: StagePlan, options: Options, summary: Summary, unchanged: Unchanged
) -> Iterator[pl.DataFrame]:
    for pairing, benchmark, target in loading.load(stage, options.jobs, options.beside):
        samples = _of_samples(stage, pairing)
        if samples is not None:
            yield _table(stage, pairing, samples, options, summary)
            continue
        for rows in _ahead(_side_by_side(benchmark, target, options, unchanged)):
            yield _table(stage, pairing, rows, options, summary)


def _of_samples(stage: StagePlan, pairing: Pairing) -> pl.DataFrame | None:
    """Rollouts of both sides, sample by sample; None where they are no rollouts."""
    sides = stage.benchmark, stage.target
    both = pairing.benchmark, pairing.target
    read = [
        side.read(process)
        for side, process in zip(sides, both, strict=True)
        if isinstance(side, RolloutStage) and process is not None
    ]
    if len(read) < len(sides):
        return None
    # Imported here: most comparisons are of dumps.
    from rlprobe.compare.match import samples
    from rlprobe.dumps.rollouts import table

    left, right = read[0].frame, table.meeting(*read)
    matches = samples.match(left.get_column("name"), right.get_column("name"))
    return pairs.side_by_side(left, right, matches)


def _side_by_side(
    benchmark: Table, target: Table, options: Options, unchanged: Unchanged
) -> Iterator[pl.DataFrame]:
    """Both sides' records as :mod:`.pairs` puts them, slice by slice where rows stand alone."""
    mapped = options.rules is not None and options.rules.mapping is not None
    large = benchmark.height > _SLICE
    if large and not mapped:
        unchanged.look(benchmark, target, _SLICE)
    same = not mapped and (unchanged.same("name") or pairs.same_names(benchmark, target))
    sliced = same and large
    whole = sliced and (options.noise is not None or _both_kept_tensors(benchmark, target))
    if whole or not sliced:
        unchanged.forget()
    if not sliced:
        left, right = benchmark.rows(pairs.LOADED), target.rows(pairs.LOADED)
        if not same or shift.shifted(left, right):
            # Imported here: most pairs have the same names.
            with uncollected():
                from rlprobe.compare.match import matcher, rules

            found = matcher.match(left, right, options.rules or rules.load())
            yield pairs.side_by_side(found.benchmark, found.target, found.matches)
        else:
            yield pairs.side_by_side(left, right, None)
        return
    length = benchmark.height if whole else _SLICE
    alike = ["name", *(name for name in pairs.SLIM if unchanged.same(name))]
    wanted = (
        (benchmark, pairs.LOADED[: len(pairs.COMMON)]),
        (benchmark, pairs.LOADED[len(pairs.COMMON) :]),
        (target, [name for name in pairs.SLIM if name not in alike]),
    )
    # a slice is of one row group, which one core decodes
    with ThreadPoolExecutor(len(wanted)) as readers:
        for start in range(0, benchmark.height, length):
            reading = [readers.submit(side.rows, names, start, length) for side, names in wanted]
            first, second, right = (part.result() for part in reading)
            left = first.hstack(second)
            yield pairs.side_by_side(left, left.select(alike).hstack(right), None, alike)


def _ahead(items: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """The same, each made in another thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def _both_kept_tensors(*sides: Table) -> bool:
    """Whether both sides kept any record's tensor; then all are measured in one go, in threads."""
    return all(side.rows(["data_name"]).null_count().item() < side.height for side in sides)


def _table(
    stage: StagePlan,
    pairing: Pairing,
    side_by_side: pl.DataFrame,
    options: Options,
    summary: Summary,
) -> pl.DataFrame:
    """The measured rows of one process pair, columns of :data:`writer.SCHEMA`."""
    table = measures.measure(side_by_side)
    alone = _one_sided(stage, pairing, bool(options.map_steps))
    if alone is not None:
        table = table.with_columns(reason=pl.coalesce("reason", pl.lit(alone)))
    if _has_tensors(table):
        table = _elementwise(table, stage, pairing, options, summary)
    ranks = {
        f"rank_{side}": pl.when(pl.col(f"order_{side}").is_not_null()).then(
            pl.lit(process.rank if process else None, pl.Int32)
        )
        for side, process in (("benchmark", pairing.benchmark), ("target", pairing.target))
    }
    table = writer.completed(
        table.with_columns(
            step=pl.lit(pairing.step, pl.Int32), rank=pl.lit(pairing.rank, pl.Int32), **ranks
        )
    )
    return table if options.noise is None else writer.completed(options.noise(table))


def _has_tensors(table: pl.DataFrame) -> bool:
    """Whether any record kept its tensor on both sides, with content not known to be equal."""
    names = [table.get_column(f"data_name_{side}") for side in ("benchmark", "target")]
    if any(column.null_count() == len(column) for column in names):
        return False
    wanted = names[0].is_not_null() & names[1].is_not_null()
    known = table.get_column("identical") & table.get_column("error_kind").is_in(
        [measures.DIGEST, measures.TENSOR]
    )
    return bool((wanted & ~known.fill_null(False)).any())


def _elementwise(
    table: pl.DataFrame, stage: StagePlan, pairing: Pairing, options: Options, summary: Summary
) -> pl.DataFrame:
    # Imported here: compiled kernels cost more to import than most comparisons take.
    with uncollected():
        from rlprobe.compare.tensors import elementwise

    benchmark, target = (
        side.tensors(process, options.check_crc) if side and process else None
        for side, process in (
            (stage.benchmark, pairing.benchmark),
            (stage.target, pairing.target),
        )
    )
    lacks = elementwise.lacking(benchmark, target)
    for side, none in zip(("benchmark", "target"), lacks, strict=True):
        if none:
            named = table.height - table.get_column(f"data_name_{side}").null_count()
            summary.without_tensors[side] += named
    return elementwise.measure(table, benchmark, target, options.jobs)
