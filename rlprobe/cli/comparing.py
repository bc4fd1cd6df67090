"""What ``rlprobe compare`` does once its arguments are known: compare, write, print."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlprobe import terminal
from rlprobe.cli.common import write_json
from rlprobe.compare import lacking, outdir, planner, sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.insufficiency import insufficient
from rlprobe.compare.planner import StagePlan
from rlprobe.compare.sides import Side
from rlprobe.compare.writer import Summary
from rlprobe.errors import NotComparableError, RlprobeError, UsageError
from rlprobe.files import written
from rlprobe.imports import uncollected
from rlprobe.said import listed
from rlprobe.stages import ALIASES

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import polars as pl

    from rlprobe.compare.stacks import Called


def run(args: argparse.Namespace, beside: Executor | None) -> int:
    """The exit code.

    Args:
        args: the command line, checked as far as it can be alone.
        beside: a process to decode dump files in.

    Raises:
        RlprobeError: a side is not there or damaged, or too little could be compared.
    """
    given = (args.benchmark, args.target, args.train_infer, args.engine_dump)
    outdir.require_apart(args.out, [p for name in given if name and (p := Path(name)).exists()])
    if args.json is not None:
        # whatever ends this command leaves no earlier result
        args.json.unlink(missing_ok=True)
    try:
        lack, summaries = (
            _two_sides(args, beside) if args.train_infer is None else _train_infer(args)
        )
    except RlprobeError as error:
        _write_result(args, error, [])
        raise
    _write_result(args, lack, summaries)
    if lack is not None:
        if not args.no_fail:
            raise lack
        _log.warning("%s", lack)
    return 0


def _options(args: argparse.Namespace, beside: Executor | None = None) -> Options:
    own = None
    if args.rules is not None:
        from rlprobe.compare.match import rules

        own = rules.load(args.rules)
    return Options(
        args.pair,
        tuple(args.stage),
        args.coverage,
        args.jobs,
        args.check_crc,
        _bounds() if args.noise else None,
        own,
        dict(args.map_step),
        beside,
    )


_Outcome = tuple[NotComparableError | None, list[dict[str, Any]]]


def _write_result(
    args: argparse.Namespace, lack: RlprobeError | None, summaries: list[dict[str, Any]]
) -> None:
    if args.json is None:
        return
    message = None if lack is None else str(lack)
    write_json(args.json, {"comparable": lack is None, "message": message, "stages": summaries})


def _two_sides(args: argparse.Namespace, beside: Executor | None) -> _Outcome:
    """Why the comparison is none, and what each stage's summary says."""
    if args.benchmark is None or args.target is None or args.engine_dump is not None:
        raise UsageError("give BENCHMARK and TARGET, or --train-infer RUN [--engine-dump DIR]")
    if args.table in ("xlsx", "both"):
        from rlprobe.compare.msprobe import excel

        excel.require()  # before anything is compared
    chosen = [ALIASES.get(name, name) for name in args.stage]
    with outdir.answerable(args.out, chosen):
        planner.require_once(args.map_step)
        options = _options(args, beside)
        benchmark, target = sides.both(args.benchmark, args.target, args.store)
    outdir.require_apart(args.out, (benchmark.path, target.path))
    if benchmark.path.resolve() == target.path.resolve():
        _log.warning("note: BENCHMARK and TARGET are the same, %s", benchmark.path)
    written = chosen or [*benchmark.stages, *target.stages]
    with outdir.alone(args.out, written, bool(chosen)):
        try:
            summaries = compare(benchmark, target, args.out, options)
        except NotComparableError as error:
            return error, []
        _tell_unused(args, options, summaries)
        outdir.say(args.out, benchmark.path, target.path, options.coverage, options.map_steps)
        plan = _planned(benchmark, target, options) if args.table or args.stacks else []
        if args.table and not plan:
            _log.warning("note: no records were compared, so that there is no table of them")
        called = _called() if plan else None
        if args.table and called is not None:
            for stage in plan:
                _write_table(args.out / stage.stage, stage, args.table, called)
            called.tell()
        # with --no-fail a job goes on to diagnose, which judges everything
        found = any(s.compared or s.joined for s in summaries)
        if found and not (args.quiet or args.no_fail):
            _print(args, summaries, plan, called)
    return insufficient(summaries, options.coverage, options.stages), [
        s.as_dict() for s in summaries
    ]


#: Entries of a file of rules that are named.
_NAMED = 6


def _tell_unused(args: argparse.Namespace, options: Options, summaries: list[Summary]) -> None:
    """What of the file of rules met nothing: a name that is written wrong, or of another model."""
    if options.rules is None:
        return
    idle = options.rules.unused({name for s in summaries for name in s.rules})
    if idle:
        named = [lacking.short(name) for name in idle]
        _log.warning(
            "note: %s of %s met nothing: %s",
            terminal.counted(len(idle), "entry", "entries"),
            args.rules,
            listed(named, _NAMED),
        )


def _planned(benchmark: Side, target: Side, options: Options) -> list[StagePlan]:
    """The stages whose records were compared; none where the sides share key data alone."""
    try:
        return planner.plan(benchmark, target, options.stages, options.map_steps)
    except NotComparableError:
        return []


def _called() -> Called:
    # Imported here: most comparisons ask for no stacks.
    from rlprobe.compare.stacks import Called

    return Called()


def _print(
    args: argparse.Namespace,
    summaries: list[Summary],
    plan: list[StagePlan],
    called: Called | None,
) -> None:
    """What was found, for whoever sits before the screen."""
    # Imported here: judging is not needed before something was compared.
    with uncollected():
        from rlprobe.judge import outline
        from rlprobe.judge.inputs import Results
        from rlprobe.judge.judge import judge

    if sum(sum(s.counts.values()) for s in summaries) > outline.MOST and not args.stacks:
        for line in outline.unjudged(summaries, str(args.out)):
            print(terminal.safe(line))
        return
    results = Results.of_comparison(args.out, [s.stage for s in summaries])
    step = judge(results, outline.first_step(results))
    stacks: dict[str, Sequence[str]] = {}
    if args.stacks and called is not None:
        stacks = called.both(plan, outline.listed(step))
        called.tell()
    for line in outline.lines(step, summaries, str(args.out), stacks):
        print(terminal.safe(line))


def _write_table(directory: Path, stage: StagePlan, kind: str, called: Called) -> None:
    import polars as pl

    from rlprobe.compare.msprobe import table
    from rlprobe.documents import csvfile
    from rlprobe.dumps.results import RECORDS

    records = pl.read_parquet(directory / RECORDS, glob=False)
    made = table.table(records, stacks=called.column(records, stage))
    if kind in ("csv", "both"):
        with written(directory / "table.csv") as path:
            # every cell of msprobe's table is a text, numbers too
            csvfile.guarded(made, numbers=True).write_csv(path)
    if kind in ("xlsx", "both"):
        from rlprobe.compare.msprobe import excel

        excel.write(made, directory / "table.xlsx")


def _bounds() -> Callable[[pl.DataFrame], pl.DataFrame]:
    # Imported here: most comparisons leave the bounds to diagnose.
    from rlprobe.judge import noise

    return noise.annotate


def _digested(run: Path) -> pl.DataFrame:
    """The weights that a stored run, or one's scratch space, has digests of; none elsewhere."""
    import polars as pl

    from rlprobe.store import parts
    from rlprobe.store.read import Run

    if (run / "manifest.json").exists():
        table = Run.open(run.parent.parent, run.name).weights()
    else:
        table = parts.weights(run / "side")
    return pl.DataFrame(schema=parts.WEIGHTS) if table is None else table


def _train_infer(args: argparse.Namespace) -> _Outcome:
    """The same of training against inference."""
    if args.benchmark is not None:
        raise UsageError("--train-infer takes one run, and no BENCHMARK and TARGET")
    # Imported here: it needs the tensor kernels, which most comparisons do without.
    import polars as pl

    from rlprobe.compare.traininfer import run as traininfer
    from rlprobe.compare.traininfer.sources import NAME
    from rlprobe.dumps.results import RECORDS
    from rlprobe.judge import engine as engine_gap
    from rlprobe.judge import engine_weights

    with outdir.answerable(args.out, [NAME]):
        options = _options(args)
        run = sides.resolve(args.train_infer, args.store)
        engine = None if args.engine_dump is None else sides.resolve(args.engine_dump, args.store)
    outdir.require_apart(args.out, [side.path for side in (run, engine) if side is not None])
    with outdir.alone(args.out, [NAME], True):
        try:
            outcome = traininfer.compare(run, engine, args.out, options)
        except NotComparableError as error:
            return error, []
    traininfer.tell(outcome)
    records = pl.read_parquet(args.out / NAME / RECORDS, glob=False)
    synced = [] if engine is not None else engine_weights.steps(_digested(run.path))
    said = map(engine_weights.line, synced)
    for part in (*said, *engine_gap.weights(records), *engine_gap.parts(records)):
        print(terminal.safe(str(part)))
    return outcome.insufficient(), [outcome.summary.as_dict()]
