"""Key data of one rollout, written when the step is over and everything is known.

Where slime's own train-data dump gathers all shards, it is the source: it puts context-parallel
fields together again and has the log-probs of the training forward where old_log_prob did not run.
Everywhere else each rank writes what its ``rollout_data`` holds, the same values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlprobe.capture import key_data
from rlprobe.capture.session import Session
from rlprobe.frameworks.slime import batch, train_data
from rlprobe.frameworks.slime import running as state
from rlprobe.frameworks.slime.running import Running

_Put = Callable[[str, int, list[Any]], None]
#: Imported by the versions whose train-data dump gathers.
_GATHERING = "slime.observability.train_data_utils"


def write(session: Session, running: Running, step: int) -> None:
    """Write the rollout's key data for every micro-batch of this rank, or of all of them."""
    if not session.capture.key_data:
        return
    rank = state.rank()
    if running.role == "critic":
        # values alone: everything else is the actor's, which has a rank of the same number
        _write(
            running.rollout_data, batch.CRITIC_KEYS, _schedule(running), _to(session, step, rank)
        )
        return
    configured = getattr(running.actor.args, "save_debug_train_data", None)
    if configured is None or _GATHERING not in sys.modules:
        put = _to(session, step, rank)
        schedule = _schedule(running)
        _write_tokens(running.rollout_data, schedule, put)
        _write(running.rollout_data, batch.ACTOR_KEYS, schedule, put)
        return
    path = train_data.find(configured, running.rollout_id, rank)
    if path is None:
        return  # one rank writes the file for all
    for shard, schedule, columns in train_data.shards(path):
        put = _to(session, step, shard)
        _write_tokens(columns, schedule, put)
        _write(columns, batch.ACTOR_KEYS, schedule, put)


def _to(session: Session, step: int, rank: int) -> _Put:
    if not session.capture.wants_rank(rank):
        return lambda name, index, rows: None
    return functools.partial(_put, Path(session.dump), step, rank)


def _put(root: Path, step: int, rank: int, name: str, index: int, rows: list[Any]) -> None:
    key_data.write(root, name, step, rank, index, rows)


def _write_tokens(data: Mapping[str, Any], schedule: list[list[int]], put: _Put) -> None:
    for index, rows in enumerate(schedule):
        for name, values in batch.tokens(data, rows):
            put(name, index, values)


def _write(
    data: Mapping[str, Any], names: Mapping[str, str], schedule: list[list[int]], put: _Put
) -> None:
    for index, rows in enumerate(schedule):
        for name, values in batch.key_data(data, names, rows):
            put(name, index, values)


def _schedule(running: Running) -> list[list[int]]:
    if running.iterator is not None:
        return batch.micro_batches(running.iterator)
    return [list(range(len(running.rollout_data["response_lengths"])))]
