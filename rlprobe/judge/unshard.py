"""What shards of one tensor are together.

Sketches of shards whose places are known add up (:mod:`rlprobe.sketch`), and so do squared norms.
Replicas (data parallel) hold the same part and count once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

#: Keys: ``local_shape``, ``offset``, ``complete``, ``norm``, ``sketch``, and ``digest`` if known.
Shard = dict[str, Any]


def distinct(shards: Iterable[Shard]) -> list[Shard]:
    """One of each part."""
    seen: dict[tuple[Any, ...], Shard] = {}
    for shard in shards:
        # A shard of unknown place is another's replica where its content is the same.
        place = shard["offset"] if shard["offset"] is not None else shard.get("digest")
        seen.setdefault((tuple(shard["local_shape"]), place), shard)
    return list(seen.values())


def is_placed(shard: Shard) -> bool:
    """Whether it is known which part of the whole a shard is."""
    return shard["offset"] is not None or bool(shard["complete"])


def sketch(shards: Iterable[Shard]) -> npt.NDArray[np.float64] | None:
    """Of the whole tensor; None where a shard has none or its place is unknown."""
    parts = distinct(shards)
    if not all(map(is_placed, parts)) or any(part["sketch"] is None for part in parts):
        return None
    return np.asarray(np.sum([np.asarray(p["sketch"], np.float64) for p in parts], axis=0))


def norm(shards: Iterable[Shard]) -> float | None:
    """L2 norm of the whole tensor; None where a shard's is unknown."""
    parts = distinct(shards)
    if any(part["norm"] is None for part in parts):
        return None
    return math.sqrt(sum(float(part["norm"]) ** 2 for part in parts))
