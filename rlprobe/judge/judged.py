"""A stage of one comparison, ready to be judged: rows in execution order with their floors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from rlprobe.dumps.results import RECORDS
from rlprobe.errors import DumpError
from rlprobe.judge import changes, execution, floors, noise, propagated, shards, sketched
from rlprobe.judge.excuses import positions, recomposed, ties
from rlprobe.judge.execution import Call
from rlprobe.judge.inputs import Results
from rlprobe.roles import HIGH_PRECISION, REPEAT, REPEAT_TARGET, TARGET

#: Columns of records.parquet that judging needs.
COLUMNS = [
    "step", "rank", "rank_benchmark", "rank_target", "order", "name", "module", "op", "call",
    "direction", "slot", "index", "status", "reason",
    *(f"{name}_{side}" for name in ("name", "dtype", "shape", "max", "min", "mean", "norm", "value",
                                    "digest")
      for side in ("benchmark", "target")),
    "max_diff", "min_diff", "mean_diff", "norm_diff", "error", "error_kind", "error_uncertainty",
]  # fmt: skip
_REPEAT_COLUMNS = ["step", "rank", "name", "error", "error_kind", "error_uncertainty"]


@dataclass(frozen=True)
class Process:
    """One rank's rows of a stage's first captured step."""

    rank: int
    rows: pl.DataFrame
    calls: list[Call] = field(repr=False)
    #: Choices of experts that fell the other way at near ties (:mod:`ties`).
    near_ties: int = 0
    #: Blocks that agree and hold their rows otherwise inside (:mod:`recomposed`).
    recomposed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Stage:
    """One stage of the target's comparison."""

    name: str
    step: int
    processes: list[Process]
    #: Why records of micro-batches cannot be judged by position; None where they can.
    misplaced: str | None = None
    #: Sketches of rows that stand for several shards.
    joined: sketched.Joined = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> pl.DataFrame:
        """All ranks' rows."""
        return pl.concat([process.rows for process in self.processes])

    @property
    def before_update(self) -> int | None:
        """Micro-batches before weights first change within the stage; None where they do once."""
        rows = self.rows
        updates = rows.filter(pl.col("slot") == "grad_reduced").get_column("call").n_unique()
        if updates <= 1:
            return None
        judged = rows.filter(pl.col("judged") & (pl.col("phase") < execution.GRADIENTS))
        last = judged.get_column("passage").max()
        return int(last) + 1 if isinstance(last, int) else 0


def scan(results: Results, pair: str, stage: str, columns: list[str]) -> pl.LazyFrame | None:
    """A comparison's records; None where there are none.

    Raises:
        DumpError: the file is damaged or of another version.
    """
    lazy = results.table(pair, stage)
    if lazy is None:
        return None
    missing = set(columns) - set(lazy.collect_schema().names())
    if missing:
        path = results.compared(pair, stage) / RECORDS
        raise DumpError(f"{path} lacks column {min(missing)!r}; compare again")
    return lazy.select(columns)


def collect(lazy: pl.LazyFrame, path: Path) -> pl.DataFrame:
    """The rows of a scan.

    Raises:
        DumpError: the file is damaged.
    """
    try:
        return lazy.collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DumpError(f"{path} is not readable: {error}; compare again") from error


def load(results: Results, stage: str, step: int, products: float = 0.0) -> Stage | None:
    """The target's comparison of a stage at one step; None where nothing was compared.

    Args:
        results: what was compared.
        stage: canonical name.
        step: captured step, from 0.
        products: see :func:`rlprobe.judge.noise.annotate`.

    Raises:
        DumpError: a table is damaged.
    """
    lazy = scan(results, TARGET, stage, COLUMNS)
    if lazy is None:
        return None
    rows = collect(lazy.filter(pl.col("step") == step), results.compared(TARGET, stage))
    if rows.is_empty():
        return None
    repeats = {}
    for pair in (REPEAT, REPEAT_TARGET):
        frame = _control(results, pair, stage, step)
        if frame is not None:
            repeats[pair] = frame
    precise = _control(results, HIGH_PRECISION, stage, step)
    whole = shards.joined(rows, results, stage, step)
    rows = whole.rows
    # Here rather than in compare: a better bound needs no comparison made again.
    inherited = propagated.inherited(results, stage, step, rows)
    rows = noise.annotate(rows, products=products, inherited=inherited)
    rows = changes.with_dense(rows, results, stage, step, whole.sketches)
    rows = floors.with_floor(rows, repeats, precise)
    found = []
    for (rank,), part in rows.group_by("rank", maintain_order=True):
        ordered, calls = execution.timeline(part)
        ordered, near_ties = ties.allow(ordered)
        ordered, blocks = recomposed.allow(ordered, calls)
        found.append(Process(int(str(rank)), ordered, calls, near_ties, blocks))
    found.sort(key=lambda process: process.rank)
    everything = pl.concat([process.rows for process in found])
    misplaced = positions.difference(results, stage, step, everything)
    if misplaced is not None:
        found = [
            dataclasses.replace(p, rows=positions.only_what_has_no_place(p.rows)) for p in found
        ]
    return Stage(stage, step, found, misplaced, whole.sketches)


def _control(results: Results, pair: str, stage: str, step: int) -> pl.DataFrame | None:
    lazy = scan(results, pair, stage, _REPEAT_COLUMNS)
    if lazy is None:
        return None
    return collect(lazy.filter(pl.col("step") == step), results.compared(pair, stage))
