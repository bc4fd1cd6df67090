"""What a process kept of a model's state: ``{directory}/{role}-rank{R}.json``.

The numbers lie beside it in safetensors files (``files``), which hold tensors and no code. Keys
there are ``weight:{parameter}``, ``{key}:{parameter}`` of the optimizer's state, ``buffer:{name}``
and ``generator:{device}``. What is no tensor stands in the index itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlprobe import formats
from rlprobe.capture.files import write_json
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ReplayError

FORMAT = 1
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Parameter:
    """One parameter, or what the process held of it."""

    #: Shape of the whole.
    shape: tuple[int, ...]
    #: Shape of what was held.
    local_shape: tuple[int, ...]
    #: Where that begins (:meth:`rlprobe.capture.parameters.Held.offsets`); None: whole, or unknown.
    offset: dict[str, Any] | None
    #: Whether the whole was held.
    complete: bool
    #: Keys of the optimizer's state that are tensors laid out as the parameter.
    tensors: tuple[str, ...] = ()
    #: Those that are numbers (how many steps it made).
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Index:
    """One process's part of a model's state."""

    role: str
    rank: int
    world_size: int
    step: int
    #: Class of the optimizer; None where the model has none.
    optimizer: str | None
    files: tuple[str, ...]
    parameters: dict[str, Parameter]
    buffers: tuple[str, ...] = ()
    #: States of random generators that are no tensors, by library (:mod:`.generators`).
    generators: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Write ``{role}-rank{R}.json``; last, because it says that the rest is there."""
        raw = {"format": FORMAT, **dataclasses.asdict(self)}
        write_json(directory / f"{stem(self.role, self.rank)}.json", raw)


def stem(role: str, rank: int) -> str:
    """Of the names of a process's files."""
    return f"{role}-rank{rank}"


def read_all(directory: Path, role: str) -> list[Index]:
    """What every process kept of a role, in the order of ranks.

    Raises:
        ReplayError: nothing was kept, or an index is not what :meth:`Index.write` writes.
    """
    found = [read(path) for path in sorted(directory.glob(f"{role}-rank*.json"))]
    if not found:
        raise ReplayError(f"{directory} holds no state of the {role}; see controls.rejoin")
    ranks = sorted(index.rank for index in found)
    world = found[0].world_size
    if ranks != list(range(world)) or any(i.world_size != world for i in found):
        raise ReplayError(
            f"{directory}: the {role}'s state is of ranks {ranks}, of {world} processes: a part "
            "is missing"
        )
    return sorted(found, key=lambda index: index.rank)


def read(path: Path) -> Index:
    """Read an index, which may come from elsewhere: nothing in it is taken for granted.

    Raises:
        ReplayError: it is damaged, of another version, or names files outside its directory.
    """
    try:
        raw = jsonfile.mapping(jsonfile.load(path, most=_MAX_BYTES))
    except DocumentError as error:
        raise ReplayError(f"{path}: {error}") from error
    formats.check(raw.pop("format", None), (FORMAT,), str(path), ReplayError)
    try:
        index = Index(**_tuples(raw))
        parameters = {
            str(name): Parameter(**_tuples(jsonfile.mapping(entry)))
            for name, entry in index.parameters.items()
        }
        _check(index, parameters)
    except (TypeError, ValueError, AttributeError, DocumentError) as error:
        raise ReplayError(f"{path} is no index of a model's state: {error}") from error
    return dataclasses.replace(index, parameters=parameters)


def _tuples(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


def _check(index: Index, parameters: Mapping[str, Parameter]) -> None:
    if not all(isinstance(number, int) for number in (index.rank, index.world_size, index.step)):
        raise ValueError("rank, world_size and step are whole numbers")
    for name in index.files:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{name!r} is no file beside it")
    for name, entry in parameters.items():
        sizes = (*entry.shape, *entry.local_shape)
        if not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise ValueError(f"{name} has a shape that is none")
        if not all(isinstance(number, int | float) for number in entry.numbers.values()):
            raise ValueError(f"{name} has state that is no number")
