"""What shards of one tensor are together.

Sketches of shards whose offsets are known add up (:mod:`rlprobe.sketch`), and so do squared norms.
Replicas (data parallel) hold the same part and count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl


@dataclass(frozen=True)
class Part:
    """Which part of a tensor one rank holds."""

    #: Of the whole tensor, and of the part.
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    #: Where the part lies in the whole, as JSON; None where it is the whole, or unknown.
    offset: str | None
    #: It is the whole tensor.
    complete: bool

    @property
    def is_placed(self) -> bool:
        """Whether it is known which part of the whole this is."""
        return self.offset is not None or self.complete


@dataclass(frozen=True)
class Shard:
    """A part, and what is known of its numbers."""

    part: Part
    norm: float | None
    #: Shape (k,).
    sketch: npt.NDArray[np.float64] | None
    digest: str | None = None


@dataclass(frozen=True)
class Parameter(Shard):
    """A rank's shard of a parameter, as it was digested."""

    name: str = ""
    dtype: str = ""


AnyShard = TypeVar("AnyShard", bound=Shard)
_PART = ("shape", "local_shape", "offset", "complete")


def parts(weights: pl.DataFrame) -> Iterator[tuple[int, str, Part]]:
    """Rank, name and part of every row of ``weights.parquet``."""
    for rank, name, shape, local, offset, complete in weights.select(
        "rank", "name", *_PART
    ).iter_rows():
        yield rank, name, Part(tuple(shape), tuple(local), offset, bool(complete))


def parameters(weights: pl.DataFrame) -> Iterator[Parameter]:
    """The shards that the rows of ``weights.parquet`` are of."""
    numbers = weights.select("dtype", "digest", "norm", "sketch").iter_rows()
    for (_, name, part), (dtype, digest, norm, sketch) in zip(parts(weights), numbers, strict=True):
        vector = None if sketch is None else np.asarray(sketch, np.float64)
        yield Parameter(part, norm, vector, digest, name, dtype)


def distinct(shards: Iterable[AnyShard]) -> list[AnyShard]:
    """One of each part."""
    seen: dict[tuple[tuple[int, ...], str | None], AnyShard] = {}
    for shard in shards:
        # A shard of unknown offset is another's replica where its content is the same.
        offset = shard.part.offset if shard.part.offset is not None else shard.digest
        seen.setdefault((shard.part.local_shape, offset), shard)
    return list(seen.values())


def sketch(shards: Iterable[Shard]) -> npt.NDArray[np.float64] | None:
    """Of the whole tensor; None where a shard has none or its offset is unknown."""
    held = distinct(shards)
    known = [shard.sketch for shard in held if shard.sketch is not None and shard.part.is_placed]
    return np.asarray(np.sum(known, axis=0)) if len(known) == len(held) else None


def norm(shards: Iterable[Shard]) -> float | None:
    """L2 norm of the whole tensor; None where a shard's is unknown."""
    held = distinct(shards)
    known = [float(shard.norm) ** 2 for shard in held if shard.norm is not None]
    return math.sqrt(sum(known)) if len(known) == len(held) else None
