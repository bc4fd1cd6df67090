"""Where one process's tensor files are, on either side, and how a record finds its own."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from rlprobe.dumps.apinames import SEPARATOR
from rlprobe.dumps.tensors.dtypes import DTYPES
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError, map_file, read_tensor

_ODD = re.compile(r"[/\\\x00]")


class Span(Protocol):
    """Bytes ``offset`` to ``offset + size`` of a file (:class:`.spans.Span`)."""

    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class TensorSource:
    """One process's tensor files on one side."""

    #: Opens a file by the name dump.json gives it.
    file: Callable[[str], TensorFile]
    #: Whether there is no file at all, whatever records name.
    empty: bool = False

    def open(self, name: str, shape: Sequence[int] | None, dtype: str | None = None) -> TensorFile:
        """The tensor of a record; several names are parts joined into a fused module's tensor.

        Raises:
            TensorFileError: with the reason; also where a file holds another shape or type than
                its record.
        """
        names = name.split(SEPARATOR)
        if len(names) == 1:
            tensor = self.file(name)
        else:
            tensor = _joined([self.file(part) for part in names], shape or ())
        if shape is not None and list(tensor.shape) != list(shape):
            raise TensorFileError(
                f"it holds shape {list(tensor.shape)}, the record says {list(shape)}"
            )
        if dtype is not None and not _of_type(tensor, dtype, names[0]):
            raise TensorFileError(
                f"it holds {tensor.dtype.name}, the record says {dtype.rpartition('.')[2]}"
            )
        return tensor


def _of_type(tensor: TensorFile, dtype: str, name: str) -> bool:
    """Whether a file holds the type its record says; numpy's files cannot hold all of them."""
    said = dtype.rpartition(".")[2].lower()
    known = DTYPES.get(said)
    if known is None or known == tensor.dtype:
        return True
    return name.endswith(".npy") and not known.in_numpy and tensor.dtype.name == "float32"


def _plain(name: str) -> str:
    """A file name that stays in its directory.

    Raises:
        TensorFileError: it does not.
    """
    if _ODD.search(name) or name in ("", ".", ".."):
        raise TensorFileError(f"data_name {name!r:.80} is no plain file name; refused")
    return name


def _joined(parts: Sequence[TensorFile], shape: Sequence[int]) -> TensorFile:
    """The parts one behind the other along the axis in which the whole is larger."""
    first = parts[0]
    axes = [
        axis
        for axis in range(len(shape))
        if all(
            len(part.shape) == len(shape)
            and part.dtype == first.dtype
            and all(part.shape[a] == n for a, n in enumerate(shape) if a != axis)
            for part in parts
        )
        and sum(part.shape[axis] for part in parts) == shape[axis]
    ]
    if not axes:
        raise TensorFileError("its parts do not join to the whole's shape")
    arrays = [part.view() for part in parts]
    whole = np.concatenate(arrays, axis=axes[0])
    strides = tuple(stride // whole.itemsize for stride in whole.strides)
    return TensorFile(first.dtype, whole.shape, strides, whole.reshape(-1), 0)


def in_directory(directory: Path, check_crc: bool = False) -> TensorSource:
    """Plain files below ``dump_tensor_data``."""

    def find(name: str) -> TensorFile:
        return read_tensor(map_file(directory / _plain(name)), name, check_crc)

    return TensorSource(find, empty=_empty(directory))


def _empty(directory: Path) -> bool:
    """Whether nothing lies in it; of one that may not be listed its files say what is wrong."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except PermissionError:
        return False


def in_store(spans: Mapping[str, Span], check_crc: bool = False) -> TensorSource:
    """Files of a stored run, small ones packed many to a file."""
    mapped = functools.lru_cache(maxsize=8)(map_file)

    def find(name: str) -> TensorFile:
        span = spans.get(name)
        if span is None:
            raise TensorFileError("the run holds no such file")
        data = mapped(span.file)
        if span.offset + span.size > len(data):
            raise TensorFileError("the file it is packed in is cut short")
        return read_tensor(data[span.offset : span.offset + span.size], name, check_crc)

    return TensorSource(find)
