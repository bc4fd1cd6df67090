"""Rows that stand for all calls of a stage, in place of those of single calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import polars as pl

from rlprobe.judge import execution, reasons, replicas, sketched
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.inputs import Results
from rlprobe.judge.logical import layout, whole
from rlprobe.judge.logical.order import order_of
from rlprobe.judge.logical.ranks import Place
from rlprobe.judge.logical.rows import Rows
from rlprobe.judge.logical.scale import data_parallel, scale, scaled
from rlprobe.logical.names import is_stack
from rlprobe.roles import BENCHMARK, TARGET


@dataclass(frozen=True)
class Joined:
    """Rows of a stage of which those of single calls are replaced."""

    rows: pl.DataFrame
    sketches: sketched.Joined = field(default_factory=dict)
    #: Rank and slice of a record that one rank alone has otherwise, by record name.
    places: Mapping[str, Place] = field(default_factory=dict)
    #: Where a record's first call stands among the benchmark's, by record name.
    orders: Mapping[str, int] = field(default_factory=dict)
    #: Records of modules that both sides have, and how many of them have a partner.
    shared: int = 0
    paired: int = 0
    #: Of the shared ones, those that are of other tokens on the other side.
    strange: int = 0
    #: Modules that one side alone has, by side.
    alone: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Modules that are another part of the model on either side.
    divided: frozenset[str] = frozenset()


def join(
    rows: pl.DataFrame, results: Results, stage: str, step: int, before: int | None = None
) -> Joined:
    """Let one row stand for all calls of a module in a stage.

    Args:
        rows: columns of compare's records.parquet, of one stage and step, all ranks; what depends
            on micro-batches and shards is replaced.
        results: where both runs are found, with records by coordinates.
        stage: canonical name.
        step: captured step, from 0.
        before: micro-batches before the first of several updates; None where there is one.

    Raises:
        StoreError: a table is damaged.
    """
    runs = [run for role in (BENCHMARK, TARGET) if (run := results.run(role)) is not None]
    sides = [whole.of_run(run, stage, step) for run in runs]
    whole.sum_parts(sides)
    factor = scale(sides, [data_parallel(run, stage) for run in runs])
    sides[1] = {key: scaled(key, own, factor) for key, own in sides[1].items()}
    order = order_of(runs, stage, step, sides)
    modules = {key[0] for side in sides for key in side}
    apart = layout.divides_layers(results, stage)
    divided = frozenset(filter(is_stack, modules) if apart else ())
    built = Rows(step, order, divided)
    for key in sorted(dict.fromkeys((*sides[0], *sides[1])), key=lambda key: order[key[:2]]):
        built.add(key, sides[0].get(key), sides[1].get(key))
    built.parameters(runs, stage)
    alone = {side: built.alone(side) for side in ("benchmark", "target")}
    # losses of an update's micro-batches are of the one pass that each update is taken for; only
    # the first has the weights that both sides began with
    of_update = pl.col("call") // before if before else pl.lit(0)
    for side, run in zip(("benchmark", "target"), runs, strict=False):
        rows = without_replicas(rows, side, replicas.data_ranks(run, stage))
    kept = rows.filter(~_of_calls()).with_columns(
        call=pl.when(pl.col("slot") == "loss")
        .then(of_update.cast(rows.schema["call"]))
        .otherwise("call")
    )
    table = pl.concat([built.table(rows), kept])
    return Joined(
        table.sort("rank", "order", maintain_order=True),
        built.sketches,
        built.places,
        _first_calls(rows, built.names),
        built.shared(),
        built.paired,
        built.strange,
        alone,
        divided,
    )


def without_replicas(rows: pl.DataFrame, side: str, of: Mapping[int, int]) -> pl.DataFrame:
    """Leave out losses that ranks of one model have in common, but for the first rank's.

    What such a rank has otherwise than the first stays, without a partner.

    Args:
        rows: columns of compare's records.parquet, all ranks.
        side: benchmark or target.
        of: see :func:`rlprobe.judge.replicas.data_ranks`.
    """
    numbers = [
        f"{name}_{side}" for name in ("dtype", "shape", "value", "max", "min", "mean", "norm")
    ]
    rank = pl.coalesce(f"rank_{side}", "rank")
    group = [f"name_{side}", "_of"]
    own = (
        rows.filter((pl.col("slot") == "loss") & pl.col(f"name_{side}").is_not_null())
        .with_columns(_rank=rank, _of=rank.replace_strict(of, default=rank, return_dtype=pl.Int64))
        .sort("_rank", maintain_order=True)
    )
    same = pl.all_horizontal(pl.col(n).eq_missing(pl.col(n).first().over(group)) for n in numbers)
    again = (pl.col("_rank") != pl.col("_rank").first().over(group)) & same
    left_out = own.filter(again & (pl.col("status") == f"{side}_only")).select("rank", "name")
    return rows.join(left_out, on=["rank", "name"], how="anti", maintain_order="left")


def _first_calls(rows: pl.DataFrame, names: Mapping[tuple[str, str, str], str]) -> dict[str, int]:
    """The place of each record's first call in the benchmark's execution order."""
    own = rows.filter(_of_calls() & pl.col("name_benchmark").is_not_null())
    first = own.group_by("module", "direction", "slot").agg(pl.col("order").min())
    return {
        names[module, direction, slot]: order
        for module, direction, slot, order in first.iter_rows()
        if (module, direction, slot) in names and order is not None
    }


def excuses(found: Joined) -> list[Excuse]:
    """Leave out what is of modules that one side's model has not, and updates of other samples."""
    modules = [*(module for own in found.alone.values() for module in own), *found.divided]
    lone = pl.col("status").is_in(["benchmark_only", "target_only"])
    left_out = [Excuse(reasons.OTHER_MODULES, pl.col("module").is_in(modules) & lone)]
    if found.strange and not found.paired:
        # an update of other samples has other gradients
        left_out.append(Excuse(reasons.OTHER_PLACES, pl.col("phase") >= execution.LOSS))
    return left_out


def _of_calls() -> pl.Expr:
    """Rows of single calls of modules, forward and backward; losses are of the update."""
    calls = pl.col("direction").is_in(["forward", "backward"]) & (pl.col("slot") != "loss")
    return calls.fill_null(False)
