"""Tensors out of what other processes kept, whatever layout those had."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprobe.capture.parameters import Held
from rlprobe.capture.state.index import Index, Parameter
from rlprobe.errors import ReplayError


@dataclass
class Kept:
    """One process's files, opened: tensors are read when they are asked for."""

    index: Index
    directory: Path

    def __post_init__(self) -> None:
        from safetensors import SafetensorError, safe_open

        self._where: dict[str, Any] = {}
        for name in self.index.files:
            path = self.directory / name
            try:
                opened: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ReplayError(f"{path} is not readable: {error}") from error
            self._where.update(dict.fromkeys(opened.keys(), opened))

    def below(self, kind: str) -> dict[str, Tensor]:
        """Tensors whose keys are ``{kind}:{name}``, by name."""
        prefix = f"{kind}:"
        return {k.removeprefix(prefix): self.tensor(k) for k in self._where if k.startswith(prefix)}

    def tensor(self, key: str) -> Tensor:
        """A tensor.

        Raises:
            ReplayError: it is not in the files that the index names.
        """
        if key not in self._where:
            raise ReplayError(f"{self.directory}: no file of {self.index.role} holds {key}")
        found: Tensor = self._where[key].get_tensor(key)
        return found


def part(kept: Sequence[Kept], key: str, item: Held, rank: int) -> Tensor:
    """The numbers of ``{key}:{parameter}`` that lie where ``item.local`` does.

    Args:
        kept: what every process of the benchmark kept of the model.
        key: ``weight``, or a key of the optimizer's state.
        item: the parameter, or what this rank holds of it.
        rank: of this process. A part whose place is not known is taken from the process of the same
            rank, if it held one of the same shape: that it is the same part, the digests of the
            weights say, which the gate compares.

    Raises:
        ReplayError: no process kept the parameter, it has another shape, or parts of it are
            missing or lie at places that are not known.
    """
    having = [(one, entry) for one in kept if (entry := one.index.parameters.get(item.name))]
    name = f"{key}:{item.name}"
    if not having:
        raise ReplayError(f"{kept[0].directory} holds no {item.name} of {kept[0].index.role}")
    shape = having[0][1].shape
    if shape != tuple(item.shape):
        raise ReplayError(
            f"{item.name} has shape {list(shape)} on the benchmark, {list(item.shape)} here"
        )
    offset, local = item.offsets(), tuple(item.local.shape)
    for one, entry in having:
        placed = entry.complete or entry.offset is not None or one.index.rank == rank
        here = (item.complete, offset, local)
        if placed and (entry.complete, entry.offset, entry.local_shape) == here:
            return _shaped(one.tensor(name), entry, name)
    return _cut(_whole(having, name, shape), item)


def _whole(having: Iterable[tuple[Kept, Parameter]], name: str, shape: tuple[int, ...]) -> Tensor:
    whole: Tensor | None = None
    filled = torch.zeros(math.prod(shape), dtype=torch.bool)
    for one, entry in having:
        value = _shaped(one.tensor(name), entry, name)
        if whole is None:
            whole = torch.zeros(shape, dtype=value.dtype)
        _place(whole, value, entry, name)
        _place(filled.view(shape), torch.ones(entry.local_shape, dtype=torch.bool), entry, name)
    assert whole is not None
    if not bool(filled.all()):
        raise ReplayError(
            f"{name}: {int((~filled).sum())} of {filled.numel()} elements were kept by no process"
        )
    return whole


def _shaped(value: Tensor, entry: Parameter, name: str) -> Tensor:
    if tuple(value.shape) != entry.local_shape:
        raise ReplayError(f"{name} has shape {list(value.shape)}, not {list(entry.local_shape)}")
    return value


def _place(whole: Tensor, value: Tensor, entry: Parameter, name: str) -> None:
    """Put what one process held at its place."""
    try:
        match entry.offset:
            case None if entry.complete:
                whole.copy_(value)
            case {"dim": int(dim), "index": int(first)}:
                whole.narrow(dim, first, value.shape[dim]).copy_(value)
            case {"dim": 0, "pieces": list(pieces)}:
                rows = value.split([count for _, count in pieces])
                for (first, count), part in zip(pieces, rows, strict=True):
                    whole.narrow(0, first, count).copy_(part)
            case {"element": int(first)}:
                whole.view(-1)[first : first + value.numel()].copy_(value.reshape(-1))
            case _:
                raise ReplayError(
                    f"{name}: where a process's part of it lies is not known (sharded over several "
                    "dimensions of devices): give both sides the same layout"
                )
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise ReplayError(f"{name}: a part does not fit into the whole: {error}") from error


def _cut(whole: Tensor, item: Held) -> Tensor:
    """The part of a whole that lies here."""
    if item.cut is not None:
        dim, first = item.cut
        return whole.narrow(dim, first, item.local.shape[dim])
    if item.pieces:
        return torch.cat([whole.narrow(0, first, count) for first, count in item.pieces])
    if item.start is not None:
        return whole.reshape(-1)[item.start : item.start + item.local.numel()]
    if not item.complete:
        raise ReplayError(f"{item.name}: where this process's part of it lies is not known")
    return whole
