"""Bring a model to the state that another run kept, so that a step begins as it began there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rlprobe.capture.state import generators, optimizers
from rlprobe.capture.state.index import read_all
from rlprobe.capture.state.keep import buffers
from rlprobe.capture.state.pieces import Kept, part
from rlprobe.errors import ReplayError

WEIGHT = "weight"


def join(
    directory: Path, *, role: str, rank: int, models: list[nn.Module], optimizer: Any
) -> dict[str, Any]:
    """Load a state, in place; calls no collective, and every rank takes its own part.

    Args:
        directory: of the step, as :func:`rlprobe.capture.state.keep.keep` wrote it.
        role, rank: of this process.
        models: the model's chunks.
        optimizer: torch's, or Megatron's around one. Its settings stay its own.

    Returns:
        What was done, for the record: ``parameters`` and ``states`` (how many were loaded),
        ``optimizer`` (the benchmark's class), ``rounded`` (what this side's formats cannot hold),
        ``generators`` (why not all could be restored, or null).

    Raises:
        ReplayError: the state lacks a parameter, or does not fit the model.
        RunError: the optimizer keeps another kind of state.
    """
    kept = [Kept(index, directory) for index in read_all(directory, role)]
    rounded: list[str] = []
    names: set[str] = set()
    states: set[str] = set()
    for item in optimizers.copies(models, optimizer):
        names.add(item.name)
        optimizers.copied(item.local, part(kept, WEIGHT, item, rank))  # rounded, as it was there
    for item, inner in optimizers.stepped(models, optimizer):
        names.add(item.name)
        if not optimizers.copied(item.local, part(kept, WEIGHT, item, rank)):
            rounded.append(item.name)
        entry = next(e for k in kept if (e := k.index.parameters.get(item.name)))
        tensors = {key: part(kept, key, item, rank) for key in entry.tensors}
        lost = optimizers.take_over(inner, item, tensors, entry.numbers)
        rounded += [f"{key} of {item.name}" for key in lost]
        if tensors or entry.numbers:
            states.add(item.name)
    _load_buffers(kept, models)
    return {
        "parameters": len(names),
        "states": len(states),
        "optimizer": kept[0].index.optimizer,
        "rounded": rounded,
        "generators": _restore(kept, rank),
    }


def _load_buffers(kept: list[Kept], models: list[nn.Module]) -> None:
    for name, buffer in buffers(models):
        having = next((one for one in kept if name in one.index.buffers), None)
        if having is None:
            raise ReplayError(f"{kept[0].directory} holds no buffer {name}")
        value = having.tensor(f"buffer:{name}")
        if value.shape != buffer.shape:
            raise ReplayError(
                f"buffer {name} has shape {list(value.shape)} on the benchmark, "
                f"{list(buffer.shape)} here"
            )
        optimizers.copied(buffer, value)


def _restore(kept: list[Kept], rank: int) -> str | None:
    """Generators' states of the process of the same rank."""
    own = next((one for one in kept if one.index.rank == rank), None)
    if own is None:
        return f"the benchmark had no rank {rank}"
    try:
        return generators.restore(own.below("generator"), own.index.generators)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ReplayError(
            f"{own.directory}: the generators' states of rank {rank} are damaged: {error}"
        ) from error
