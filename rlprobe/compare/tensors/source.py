"""Where one process's tensor files are, on either side, and how a record finds its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlprobe.compare.tensors.tensorfile import (
    TensorFile,
    TensorFileError,
    map_file,
    read_tensor,
)


class Place(Protocol):
    """Bytes ``offset`` to ``offset + size`` of a file (:class:`rlprobe.store.tensors.Place`)."""

    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True)
class TensorSource:
    """Opens tensors by the name dump.json gives their files."""

    open: Callable[[str], TensorFile]
    #: Content digests of the files by name, where they are known without reading.
    digests: Mapping[str, str]


def in_directory(directory: Path, check_crc: bool = False) -> TensorSource:
    """Plain files below ``dump_tensor_data``."""

    def find(name: str) -> TensorFile:
        return read_tensor(map_file(directory / name), name, check_crc)

    return TensorSource(find, {})


def in_store(places: Mapping[str, Place], check_crc: bool = False) -> TensorSource:
    """Files of a stored run, small ones packed many to a file."""
    mapped = functools.lru_cache(maxsize=8)(map_file)

    def find(name: str) -> TensorFile:
        place = places.get(name)
        if place is None:
            raise TensorFileError("the run holds no such file")
        data = mapped(place.file)
        if place.offset + place.size > len(data):
            raise TensorFileError("the file it is packed in is cut short")
        return read_tensor(data[place.offset : place.offset + place.size], name, check_crc)

    return TensorSource(find, {name: place.digest for name, place in places.items()})
