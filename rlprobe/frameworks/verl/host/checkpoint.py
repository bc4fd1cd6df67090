"""Checkpoints of verl's own, which a run may begin from: ``global_step_N``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe.errors import ConfigError

_NAME = re.compile(r"global_step_(\d{1,9})")
_SHARD = "model_world_size_{world}_rank_{rank}.pt"


def step(path: str) -> int:
    """The step after which it was made, as verl reads it off the directory's name.

    Raises:
        ConfigError: the name says none.
    """
    match = _NAME.fullmatch(Path(path).name)
    if match is None:
        raise ConfigError(
            f"resume_from: {path} is not named global_step_N, from which verl knows the step; "
            "accepted: such a directory below trainer.default_local_dir of the run that made it"
        )
    return int(match[1])


def check(path: str, config: Mapping[str, Any], world_size: int, critic: bool, role: str) -> None:
    """Refuse a checkpoint that verl would stop at once its job has its devices.

    Args:
        path: the directory.
        config: verl's, as the run's overrides describe it.
        world_size: processes of the run.
        critic: whether the run has one.
        role: of the run, for messages.

    Raises:
        ConfigError: a model is not in it, or was saved by another number of processes.
    """
    for name in ("actor", *(["critic"] if critic else [])):
        directory = Path(path).expanduser() / name
        if not directory.is_dir():
            raise ConfigError(f"resume_from: {path} holds no {name}/, which {role} runs")
        if not sharded(config):
            continue
        missing = next(
            (
                shard
                for rank in range(world_size)
                if not (directory / (shard := _SHARD.format(world=world_size, rank=rank))).is_file()
            ),
            None,
        )
        if missing is not None:
            raise ConfigError(
                f"resume_from: {directory} holds no {missing}: verl's FSDP loads what as many "
                f"processes saved, and {role} has world_size {world_size}"
            )


def sharded(config: Mapping[str, Any]) -> bool:
    """Whether verl's FSDP trains, which keeps a file a rank."""
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    return str(actor.get("strategy", "fsdp")) in ("fsdp", "fsdp2")
