"""Two dumps compared and judged from Python, as polars frames."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe.compare import outdir, sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.early import COVERAGE
from rlprobe.compare.insufficiency import insufficient
from rlprobe.compare.match import rules as matching
from rlprobe.dumps import results as tables
from rlprobe.judge import analysis, outline
from rlprobe.judge.analysis import HELD
from rlprobe.judge.inputs import Results
from rlprobe.judge.judge import judge
from rlprobe.stages import ALIASES

PathLike = str | os.PathLike[str]
_KEYS = (
    *("stage", "step", "rank", "order", "name", "name_target", "module", "op", "call"),
    *("direction", "slot", "index", "within", "error", "error_kind", "floor", "excess", "beyond"),
)


@dataclass(frozen=True)
class Comparison:
    """What ``rlprobe compare`` writes and prints, in memory."""

    #: A row per record of either side (docs/compare.md has the columns), ``stage`` before them.
    records: pl.DataFrame
    #: The first step's records that were held against round-off, in execution order: error,
    #: ``floor`` (what round-off allows), ``excess`` (their ratio) and ``beyond``; ``within`` is
    #: the module whose call a call ran in, where construct.json says so.
    judged: pl.DataFrame
    #: Key data joined by sample, a row per sample and key; without rows where a side has none.
    key_data: pl.DataFrame
    #: The first record that parts, a row of ``judged`` with its stage; None where none does.
    first: dict[str, Any] | None
    #: ``summary.json`` of each stage.
    summaries: dict[str, dict[str, Any]]
    #: Why too little was compared; None where enough was.
    lack: str | None


def compare_dumps(
    benchmark: PathLike,
    target: PathLike,
    *,
    out: PathLike | None = None,
    stages: Sequence[str] = (),
    coverage: float = COVERAGE,
    rules: PathLike | None = None,
    map_steps: Mapping[int, int] | None = None,
    jobs: int = 1,
) -> Comparison:
    """Compare two dumps, or parts of them, and judge what differs.

    Args:
        benchmark, target: a run's directory, a dump tree, a stage, step, rank or proc directory, a
            dump.json or debug.json.
        out: where the results are kept, as ``rlprobe compare -o`` does; None: nowhere.
        stages: only these.
        coverage: share of both sides' records that must have been compared.
        rules: matching rules, as ``--rules``.
        map_steps: the target's step for steps of the benchmark, as ``--map-step``.
        jobs: threads that read tensors.

    Raises:
        UsageError: there is no such path or stage.
        DumpError, StoreError: a side is damaged.
        NotComparableError: the sides have no stage in common.
    """
    both = [sides.resolve(os.fspath(side)) for side in (benchmark, target)]
    own = None if rules is None else matching.load(Path(rules))
    options = Options(
        stages=tuple(stages), coverage=coverage, jobs=jobs, rules=own, map_steps=map_steps or {}
    )
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rlprobe-compare-"))
            if out is None
            else out
        )
        chosen = [ALIASES.get(name, name) for name in stages]
        written = chosen or [name for side in both for name in side.stages]
        stack.enter_context(outdir.alone(directory, written, bool(chosen)))
        summaries = compare(both[0], both[1], directory, options)
        outdir.say(directory, both[0].path, both[1].path, coverage, options.map_steps)
        lack = insufficient(summaries, options.coverage, options.stages)
        names = [summary.stage for summary in summaries]
        results = Results.of_comparison(directory, names)
        step = judge(results, outline.first_step(results))
        diverged = analysis.first_of(step)
        first = None
        if diverged is not None and diverged.origin is not None:
            first = {"stage": diverged.stage.name, **diverged.origin.row}
        held = [
            finding.stage.rows.filter(HELD).with_columns(stage=pl.lit(name))
            for name, finding in step.findings.items()
        ]
        judged = pl.concat(held, how="diagonal") if held else pl.DataFrame()
        return Comparison(
            _read(directory, names, tables.RECORDS),
            judged.select([name for name in _KEYS if name in judged.columns]),
            _read(directory, names, tables.KEY_DATA),
            first,
            {summary.stage: summary.as_dict() for summary in summaries},
            None if lack is None else str(lack),
        )


def _read(directory: Path, stages: Sequence[str], name: str) -> pl.DataFrame:
    """A table of all stages, ``stage`` first; without columns where none has it."""
    found = [
        lazy.collect().select(pl.lit(stage).alias("stage"), pl.all())
        for stage in stages
        if (lazy := tables.table(directory / stage, name)) is not None
    ]
    return pl.concat(found) if found else pl.DataFrame()
