"""Checkpoints of verl's own, which a run may begin from: ``global_step_N``."""

from __future__ import annotations

import re
from pathlib import Path

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


def check(path: str, ranks: int | None, critic: bool, role: str) -> None:
    """Refuse a checkpoint that verl would stop at once its job has its devices.

    Args:
        path: the directory.
        ranks: processes of the run, where each has saved a file of its own (FSDP); else None.
        critic: whether the run has one.
        role: of the run, for messages.

    Raises:
        ConfigError: a model is not in it, or was saved by another number of processes.
    """
    for name in ("actor", *(["critic"] if critic else [])):
        directory = Path(path).expanduser() / name
        if not directory.is_dir():
            raise ConfigError(f"resume_from: {path} holds no {name}/, which {role} runs")
        wanted = [_SHARD.format(world=ranks, rank=rank) for rank in range(ranks or 0)]
        missing = next((shard for shard in wanted if not (directory / shard).is_file()), None)
        if missing is not None:
            raise ConfigError(
                f"resume_from: {directory} holds no {missing}: verl's FSDP loads what as many "
                f"processes saved, and {role} has world_size {ranks}"
            )
