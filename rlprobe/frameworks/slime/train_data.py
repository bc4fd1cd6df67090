"""slime's own dump of a rank's training data, ``--save-debug-train-data``, read safely.

From format 2 on (after v0.3.1) one process writes all data-parallel shards, with context-parallel
fields put together again and with the log-probs that the training forward gave where old_log_prob
did not run: more than a hook on one rank sees. Before, each rank writes its ``rollout_data``
as it stands, which the hook holds already.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlprobe.errors import DumpError

FORMAT = 2
#: Fields that describe the schedule of a shard.
_LAYOUT = ("micro_batch_indices", "num_microbatches", "global_batch_sizes")


def shards(path: Path) -> Iterator[tuple[int, list[list[int]], dict[str, list[Any]]]]:
    """Of each shard in a file of format 2: rank, micro-batches and per-sample columns.

    Raises:
        DumpError: the file is damaged, of another format, or holds objects that only a full
            unpickler could make.
    """
    raw = _load(path)
    samples = raw["samples"]
    for shard in raw["dp_shards"]:
        rank = shard["data_parallel_rank"]
        mine = [sample for sample in samples if sample["data_parallel_rank"] == rank]
        order = shard.get("partition") or [sample.get("rollout_position") for sample in mine]
        by_position = {sample.get("rollout_position"): sample for sample in mine}
        if len(by_position) != len(mine) or set(by_position) != set(order):
            raise DumpError(f"{path}: the samples of rank {shard['rank']} do not fit its partition")
        rows = [by_position[position] for position in order]
        names = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
        columns = {name: [row[name] for row in rows] for name in names}
        schedule = shard.get("micro_batch_indices") or [list(range(len(rows)))]
        yield int(shard["rank"]), [list(batch) for batch in schedule], columns


def _load(path: Path) -> dict[str, Any]:
    try:
        raw = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DumpError(f"{path} holds objects that cannot be loaded safely: {error}") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DumpError(f"{path} is not a readable train-data dump ({error})") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT or not {"samples", "dp_shards"} <= raw.keys():
        raise DumpError(f"{path}: train-data dump of format {version!r}; accepted: {FORMAT}")
    return dict(raw)


def find(template: str | None, rollout_id: int, rank: int) -> Path | None:
    """The file that slime wrote for this rank and rollout, where it did."""
    if template is None:
        return None
    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    return path if path.is_file() else None
