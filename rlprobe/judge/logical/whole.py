"""One side's records by coordinates, those of all its ranks added up to the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.coordinates import GROUPS
from rlprobe.judge import replicas
from rlprobe.logical import fused
from rlprobe.sketch import K

if TYPE_CHECKING:
    from rlprobe.store.read import Run

#: (module, direction, slot).
Key = tuple[str, str, str]
Sketch = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """What one rank has of a logical record."""

    rank: int
    #: What ranks with the same tokens have in common.
    group: str
    first: int
    features: int
    sketch: Sketch
    squares: float
    sum: float
    max: float
    min: float
    count: int


@dataclass(frozen=True)
class Whole:
    """A logical record of one side."""

    op: str
    dtype: str
    width: int
    tokens: int
    identity: int
    sketch: Sketch
    norm: float
    max: float | None
    min: float | None
    mean: float | None
    #: Whether the norm is that of the elements, and not estimated from the sketch.
    counted: bool
    #: The ranks that hold it, with their features.
    parts: tuple[Part, ...]
    #: Every replica's part where there are several of one.
    replicas: tuple[Part, ...] = ()
    complete: bool = True

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.sketch).all()) and math.isfinite(self.norm)


def of_run(run: Run, stage: str, step: int) -> dict[Key, Whole]:
    table = run.logical(stage)
    assert table is not None
    ranks = {process.rank: process.dp_rank for process in replicas.processes(run, stage)}
    found: dict[Key, list[dict[str, Any]]] = {}
    for row in table.filter(pl.col("step") == step).iter_rows(named=True):
        found.setdefault((row["module"], row["direction"], row["slot"]), []).append(row)
    return {key: _whole(own, ranks) for key, own in found.items()}


def _whole(rows: Sequence[Mapping[str, Any]], data_ranks: Mapping[int, int | None]) -> Whole:
    """The sum of all ranks' parts: over features of the same tokens, then over these.

    Ranks of one model have the same tokens, or where they share a sequence others each. Two models
    (data-parallel ranks) that were given the same samples are two all the same.
    """
    width = rows[0]["width"]
    by_tokens: dict[str, dict[int, list[Part]]] = {}
    tokens: dict[str, tuple[int, int]] = {}
    for row in rows:
        own = data_ranks.get(row["rank"])
        where = row["identity"] if own is None else f"rank {own}, {row['identity']}"
        tokens[where] = row["tokens"], int(row["identity"], 16)
        by_tokens.setdefault(where, {}).setdefault(row["first"], []).append(_part(row, where))
    parts = [own[0] for each in by_tokens.values() for own in each.values()]
    replicas = [p for each in by_tokens.values() for own in each.values() if own[1:] for p in own]
    complete = all(
        sum(own[0].features for own in each.values()) == width for each in by_tokens.values()
    ) and all(row["width"] == width for row in rows)
    count = sum(part.count for part in parts)
    return Whole(
        rows[0]["op"],
        rows[0]["dtype"],
        width,
        sum(n for n, _ in tokens.values()),
        sum(identity for _, identity in tokens.values()) % (1 << 64),
        np.sum([part.sketch for part in parts], axis=0),
        math.sqrt(max(0.0, sum(part.squares for part in parts))),
        max(part.max for part in parts),
        min(part.min for part in parts),
        sum(part.sum for part in parts) / max(count, 1),
        True,
        tuple(parts),
        tuple(replicas),
        complete,
    )


def _part(row: Mapping[str, Any], group: str) -> Part:
    return Part(
        row["rank"],
        group,
        row["first"],
        row["features"],
        np.asarray(row["sketch"], np.float64).reshape(GROUPS, K),
        row["squares"],
        row["sum"],
        row["max"],
        row["min"],
        row["count"],
    )


def sum_parts(sides: list[dict[Key, Whole]]) -> None:
    """What parts send back to their common input, added up where the other side has the sum."""
    for mine, other in (sides, sides[::-1]):
        for key in [key for key in other if key not in mine]:
            module, direction, slot = key
            stem, _, name = module.rpartition(".")
            if (direction, slot) != ("backward", "output") or name not in fused.PARTS:
                continue
            parts = [mine.get((f"{stem}.{part}", *key[1:])) for part in fused.PARTS[name]]
            held = [part for part in parts if part is not None]
            if len(held) < len(parts):
                continue
            mine[key] = _added(held)
            for part in fused.PARTS[name]:
                del mine[f"{stem}.{part}", direction, slot]


def _added(parts: Sequence[Whole]) -> Whole:
    """The sum of tensors of one shape, of which the sketch alone is known."""
    sketch = np.sum([part.sketch for part in parts], axis=0)
    first = parts[0]
    return Whole(
        first.op, first.dtype, first.width, first.tokens, first.identity, sketch,
        float(np.linalg.norm(sketch)), None, None, None, False, first.parts, (),
        all(part.complete for part in parts),
    )  # fmt: skip
