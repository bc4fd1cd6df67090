"""Gradients and changes of parameters unsharded, where the sides are sharded differently.

One side's rank holds half of a parameter, the other's all of it: record against record, nothing can
be compared. Sketches of shards whose offsets are known add up to the whole tensor's
(:mod:`rlprobe.sketch`), squared norms likewise, so whole tensors can. Where an offset or a shard is
not known, nothing is said of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rlprobe.compare.measures import SKETCH_FLOOR
from rlprobe.judge import sketched, unshard
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.sketch import K

if TYPE_CHECKING:
    from rlprobe.store.read import Run

UPDATES = ("grad_reduced", "grad_clipped", "change")
_SIDES = ("benchmark", "target")
#: Parameter -> rank -> its shard's shape, offset, and the shape of the whole.
_Shards = dict[str, dict[int, dict[str, Any]]]


@dataclass(frozen=True)
class Joined:
    """Rows of a comparison, and the sketches of what was joined in them."""

    rows: pl.DataFrame
    sketches: sketched.Joined = field(default_factory=dict)


@dataclass(frozen=True)
class _Unsharded:
    shape: list[int]
    norm: float
    largest: float
    smallest: float
    mean: float
    sketch: sketched.Vector | None


def joined(rows: pl.DataFrame, results: Results, stage: str, step: int) -> Joined:
    """Let one row stand for all shards of a gradient or change, where layouts differ.

    Args:
        rows: columns of compare's records.parquet, of one stage and step, all ranks.
        results: where the runs are found.
        stage: canonical name.
        step: captured step, from 0.

    Returns:
        the rows, of which those of differently sharded parameters are replaced: a matched row on
        the benchmark's first rank, or one that was not measured where not all shards are known.

    Raises:
        StoreError: a record table is damaged.
    """
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    update = rows.filter(pl.col("slot").is_in(UPDATES) & pl.col("module").is_not_null())
    if update.is_empty() or runs[0] is None or runs[1] is None:
        return Joined(rows)
    layouts = [_layout(run, stage, step) for run in runs if run is not None]
    other = sorted(
        name
        for name in set(layouts[0]) & set(layouts[1])
        if not _alike(*(p[name] for p in layouts))
    )
    parameter = pl.concat_str("module", "index", separator=".")
    affected = rows.filter(pl.col("slot").is_in(UPDATES) & parameter.is_in(other))
    if affected.is_empty():
        return Joined(rows)
    sketches = [_sketches(run, stage, step) for run in runs if run is not None]
    kept, unsharded_sketches = [], {}
    for _, part in affected.group_by("name", maintain_order=True):
        first = part.filter(pl.col("name_benchmark").is_not_null()).sort("rank")
        if first.is_empty():
            continue
        row = first.row(0, named=True)
        name = f"{row['module']}.{row['index']}"
        both = [
            _unsharded(_shards(part, side), layouts[i][name], sketches[i])
            for i, side in enumerate(_SIDES)
        ]
        kept.append(_row(row, *both))
        if both[0] is not None and both[1] is not None:
            pair = both[0].sketch, both[1].sketch
            if pair[0] is not None and pair[1] is not None:
                unsharded_sketches[row["rank"], row["name"]] = pair[0], pair[1]
    rest = rows.join(affected.select("rank", "name"), on=["rank", "name"], how="anti")
    table = pl.concat([rest, pl.DataFrame(kept, schema=rows.schema)]).sort(
        "rank", "order", maintain_order=True
    )
    return Joined(table, unsharded_sketches)


def _layout(run: Run, stage: str, step: int) -> _Shards:
    table = run.weights()
    if table is None:
        return {}
    here = table.filter((pl.col("stage") == stage) & (pl.col("step") == step))
    found: _Shards = {}
    for row in here.select("rank", "name", "shape", "local_shape", "offset", "complete").iter_rows(
        named=True
    ):
        found.setdefault(row["name"], {}).setdefault(row["rank"], row)
    return found


def _alike(benchmark: dict[int, dict[str, Any]], target: dict[int, dict[str, Any]]) -> bool:
    """Whether every rank of both sides holds the same part."""
    held = [
        {rank: (tuple(row["local_shape"]), row["offset"]) for rank, row in side.items()}
        for side in (benchmark, target)
    ]
    return held[0] == held[1]


def _shards(part: pl.DataFrame, side: str) -> Iterable[dict[str, Any]]:
    """One side's records of a name, as rank, name, its shape, max, min, mean, norm."""
    return (
        part.filter(pl.col(f"name_{side}").is_not_null())
        .select(
            rank=pl.coalesce(f"rank_{side}", "rank"),
            name=f"name_{side}",
            recorded=f"shape_{side}",
            **{n: f"{n}_{side}" for n in ("max", "min", "mean", "norm")},
        )
        .iter_rows(named=True)
    )


def _unsharded(
    shards: Iterable[dict[str, Any]],
    layout: dict[int, dict[str, Any]],
    sketches: dict[tuple[int, str], sketched.Vector],
) -> _Unsharded | None:
    """The tensor that shards make up; None where one is missing or its offset is unknown."""
    held: list[unshard.Shard] = []
    for shard in shards:
        place = layout.get(shard["rank"])
        if place is None or not unshard.is_placed(place):
            return None
        # a distributed optimizer has a stretch of the gradient where the weight is whole
        if list(shard["recorded"]) not in (list(place["local_shape"]), list(place["shape"])):
            return None
        if any(shard[name] is None for name in ("max", "min", "mean", "norm")):
            return None
        known = {"sketch": sketches.get((shard["rank"], shard["name"]))}
        held.append(place | shard | known)
    parts = unshard.distinct(held)
    norm = unshard.norm(parts)
    sizes = [math.prod(part["local_shape"]) for part in parts]
    shape = list(parts[0]["shape"]) if parts else []
    count = sum(sizes)
    if norm is None or not count or count != math.prod(shape):
        return None
    return _Unsharded(
        shape,
        norm,
        max(part["max"] for part in parts),
        min(part["min"] for part in parts),
        sum(size * part["mean"] for size, part in zip(sizes, parts, strict=True)) / count,
        unshard.sketch(parts),
    )


def _row(
    row: dict[str, Any], benchmark: _Unsharded | None, target: _Unsharded | None
) -> dict[str, Any]:
    """``row`` with the numbers of two unsharded tensors; without an error where one is unknown."""
    row = row | {"error": None, "error_kind": None, "error_uncertainty": None}
    row |= {f"digest_{side}": None for side in _SIDES}
    if benchmark is None or target is None:
        return row | {"status": "shape", "reason": "sharded differently, and not all shards known"}
    row |= {"status": "matched", "reason": "shards joined"}
    for side, whole in zip(_SIDES, (benchmark, target), strict=True):
        row |= {
            f"shape_{side}": whole.shape, f"norm_{side}": whole.norm, f"max_{side}": whole.largest,
            f"min_{side}": whole.smallest, f"mean_{side}": whole.mean,
        }  # fmt: skip
    row |= {
        f"{name}_diff": row[f"{name}_target"] - row[f"{name}_benchmark"]
        for name in ("max", "min", "mean", "norm")
    }
    if benchmark.norm == 0:
        return row | {"error": 0.0 if target.norm == 0 else math.inf, "error_kind": "statistics"}
    if benchmark.sketch is None or target.sketch is None:
        return row | {"error": abs(row["norm_diff"]) / benchmark.norm, "error_kind": "statistics"}
    distance = float(np.linalg.norm(target.sketch - benchmark.sketch)) / benchmark.norm
    return row | {
        "error": max(distance, SKETCH_FLOOR), "error_kind": "sketch",
        "error_uncertainty": 1 / math.sqrt(2 * K),
    }  # fmt: skip


def _sketches(run: Run, stage: str, step: int) -> dict[tuple[int, str], sketched.Vector]:
    """Sketches of gradients and changes by rank and record name."""
    table = sketched.of(run, stage, step, list(UPDATES))
    if table is None:
        return {}
    return {(rank, name): np.asarray(values) for rank, name, values in table.iter_rows()}
