"""Tables of comparisons, as judging and the report read them."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.dumps.results import RECORDS
from rlprobe.errors import DumpError
from rlprobe.judge.alike import Alike
from rlprobe.judge.inputs import Results
from rlprobe.roles import TARGET

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
    except UNREADABLE as error:
        raise DumpError(f"{path} is not readable: {error}; compare again") from error


def by_rank(lazy: pl.LazyFrame, path: Path) -> list[pl.DataFrame]:
    """The rows of a scan, a frame a rank, in the order in which ranks appear.

    They are read one rank after the other, and what ranks have in common is held once.

    Raises:
        DumpError: the file is damaged.
    """
    ranks = collect(lazy.select(pl.col("rank").unique(maintain_order=True)), path)
    every = ranks.get_column("rank").to_list()
    if len(every) == 1:
        return [collect(lazy, path)]
    alike = Alike()
    return [alike.rows(collect(lazy.filter(pl.col("rank") == rank), path)) for rank in every]


def _of_one_kind(results: Results, pair: str, step: int) -> bool:
    """Whether a control began the step as the target did: at its own state, or at the benchmark's.

    A repeat that went its own way differs at a later step by what its updates left, and says
    nothing of the noise of a step that was joined.
    """
    target, other = results.run(TARGET), results.run(results.plan.pairs[pair].target)
    joined = target is not None and target.is_joined and step > 0
    return not joined or (other is not None and other.is_joined)


def control(results: Results, pair: str, stage: str, step: int) -> pl.DataFrame | None:
    """A control's comparison of a stage at a step; None where there is none.

    Raises:
        DumpError: the file is damaged or of another version.
    """
    lazy = scan(results, pair, stage, _REPEAT_COLUMNS)
    if lazy is None or not _of_one_kind(results, pair, step):
        return None
    return collect(lazy.filter(pl.col("step") == step), results.compared(pair, stage))
