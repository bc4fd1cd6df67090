"""Gradients and changes of parameters unsharded, where the sides are sharded differently.

One side's rank holds half of a parameter, the other's all of it: record against record, nothing can
be compared. Sketches of shards whose offsets are known add up to the whole tensor's
(:mod:`rlprobe.sketch`), squared norms likewise, so whole tensors can. Where an offset or a shard is
not known, nothing is said of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rlprobe.judge import sketched, unshard
from rlprobe.judge.inputs import Results
from rlprobe.judge.unshard import Part, Shard
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.sketch import deviation, distance
from rlprobe.sketch_floors import UNSEEN

if TYPE_CHECKING:
    from rlprobe.store.read import Run

UPDATES = ("grad_reduced", "grad_clipped", "change")
_SIDES = ("benchmark", "target")
#: Rank -> which part of a parameter it holds.
_Layout = dict[int, Part]


@dataclass(frozen=True)
class Joined:
    """Rows of a comparison, and the sketches of what was joined in them."""

    rows: pl.DataFrame
    sketches: sketched.Joined = field(default_factory=dict)
    #: Whether any row was replaced.
    changed: bool = False


@dataclass(frozen=True)
class _Unsharded:
    shape: list[int]
    norm: float
    largest: float
    smallest: float
    mean: float
    sketch: sketched.Vector | None


def joined(
    rows: pl.DataFrame, results: Results, stage: str, step: int, *, every: bool = False
) -> Joined:
    """Let one row stand for all shards of a gradient or change, where layouts differ.

    Args:
        rows: columns of compare's records.parquet, of one stage and step, all ranks.
        results: where the runs are found.
        stage: canonical name.
        step: captured step, from 0.
        every: all parameters, not only those that the sides have sharded otherwise; their rows are
            then rank 0's.

    Returns:
        the rows, of which those of differently sharded parameters are replaced: a matched row on
        the benchmark's first rank, or one that was not measured where not all shards are known.

    Raises:
        StoreError: a record table is damaged.
    """
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    if runs[0] is None or runs[1] is None:
        return Joined(rows)
    of_updates = pl.col("slot").is_in(UPDATES)
    if not rows.select((of_updates & pl.col("module").is_not_null()).any()).item():
        return Joined(rows)
    layouts = [_layouts(run, stage, step) for run in runs if run is not None]
    owned = [_owned(run, stage, step) for run in runs if run is not None]
    other = sorted(
        name
        for name in set(layouts[0]) & set(layouts[1])
        if every
        or not _alike(*(p[name] for p in layouts))
        or owned[0].parts.get(name) != owned[1].parts.get(name)
    )
    parameter = pl.concat_str("module", "index", separator=".")
    affected = rows.filter(of_updates & parameter.is_in(other)) if other else rows.clear()
    if affected.is_empty():
        return Joined(rows)
    sketches = [_sketches(run, stage, step) for run in runs if run is not None]
    kept, unsharded_sketches = [], {}
    for _, part in affected.group_by("name", maintain_order=True):
        first = part.filter(pl.col("name_benchmark").is_not_null()).sort("rank")
        if first.is_empty():
            continue
        row = first.row(0, named=True) | ({"rank": 0} if every else {})
        name = f"{row['module']}.{row['index']}"
        both = [
            _unsharded(
                _records(part, side), _held_by(row["slot"], name, layouts[i], owned[i]), sketches[i]
            )
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
    return Joined(table, unsharded_sketches, changed=True)


def _layouts(run: Run, stage: str, step: int) -> dict[str, _Layout]:
    """By parameter, how it was spread over the ranks."""
    table = run.weights()
    if table is None:
        return {}
    here = table.filter((pl.col("stage") == stage) & (pl.col("step") == step))
    found: dict[str, _Layout] = {}
    for rank, name, part in unshard.parts(here):
        found.setdefault(name, {}).setdefault(rank, part)
    return found


@dataclass(frozen=True)
class _Owned:
    """Which part of each parameter every rank's optimizer has, where that is another."""

    parts: dict[str, _Layout]
    #: Parameters of which the optimizer steps copies, off which changes were read.
    copied: set[str]


def _owned(run: Run, stage: str, step: int) -> _Owned:
    table = run.gradients()
    if table is None:
        return _Owned({}, set())
    found: dict[str, _Layout] = {}
    here = table.filter((pl.col("stage") == stage) & (pl.col("step") == step))
    for rank, name, part in unshard.parts(here):
        found.setdefault(name, {})[rank] = part
    copied = here.filter(pl.col("kept").is_not_null()).get_column("name")
    return _Owned(found, set(copied))


def _held_by(slot: str, name: str, parameters: dict[str, _Layout], owned: _Owned) -> _Layout:
    """How a parameter's gradient or change is spread over the ranks."""
    of_the_model = slot == "change" and name not in owned.copied
    return parameters[name] if of_the_model else owned.parts.get(name, parameters[name])


def _alike(benchmark: _Layout, target: _Layout) -> bool:
    """Whether every rank of both sides holds the same part."""
    held = [
        {rank: (part.local_shape, part.offset) for rank, part in side.items()}
        for side in (benchmark, target)
    ]
    return held[0] == held[1]


@dataclass(frozen=True)
class _Record:
    """One rank's record of a gradient or change, as it was compared."""

    rank: int
    name: str
    shape: tuple[int, ...]
    max: float | None
    min: float | None
    mean: float | None
    norm: float | None


def _records(rows: pl.DataFrame, side: str) -> Iterator[_Record]:
    """One side's records of a name."""
    columns = [f"{name}_{side}" for name in ("max", "min", "mean", "norm")]
    for rank, name, shape, *numbers in (
        rows.filter(pl.col(f"name_{side}").is_not_null())
        .select(pl.coalesce(f"rank_{side}", "rank"), f"name_{side}", f"shape_{side}", *columns)
        .iter_rows()
    ):
        yield _Record(rank, name, tuple(shape or ()), *numbers)


@dataclass(frozen=True)
class _Held(Shard):
    """A shard with all its statistics."""

    largest: float = 0.0
    smallest: float = 0.0
    mean: float = 0.0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.part.local_shape)


def _held(
    record: _Record, layout: _Layout, sketches: dict[tuple[int, str], sketched.Vector]
) -> _Held | None:
    """A record with its place in the whole; None where that or one of its numbers is unknown."""
    part = layout.get(record.rank)
    if part is None or not part.is_placed:
        return None
    # a distributed optimizer has a stretch of the gradient where the weight is whole
    if record.shape not in (part.local_shape, part.shape):
        return None
    if record.max is None or record.min is None or record.mean is None or record.norm is None:
        return None
    sketch = sketches.get((record.rank, record.name))
    return _Held(part, record.norm, sketch, None, record.max, record.min, record.mean)


def _unsharded(
    records: Iterable[_Record],
    layout: _Layout,
    sketches: dict[tuple[int, str], sketched.Vector],
) -> _Unsharded | None:
    """The tensor that shards make up; None where one is missing or its offset is unknown."""
    every = [_held(record, layout, sketches) for record in records]
    held = unshard.distinct([shard for shard in every if shard is not None])
    norm = unshard.norm(held)
    count = sum(shard.size for shard in held)
    if None in every or norm is None or not count:
        return None
    shape = held[0].part.shape
    if count != math.prod(shape):
        return None
    return _Unsharded(
        list(shape),
        norm,
        max(shard.largest for shard in held),
        min(shard.smallest for shard in held),
        sum(shard.size * shard.mean for shard in held) / count,
        unshard.sketch(held),
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
    error = distance(benchmark.sketch, target.sketch) / benchmark.norm
    return row | {
        "error": max(error, UNSEEN),
        "error_kind": "sketch",
        "error_uncertainty": deviation(),
    }


def _sketches(run: Run, stage: str, step: int) -> dict[tuple[int, str], sketched.Vector]:
    """Sketches of gradients and changes by rank and record name."""
    table = sketched.of(run, stage, step, list(UPDATES))
    if table is None:
        return {}
    return {(rank, name): np.asarray(values) for rank, name, values in table.iter_rows()}
