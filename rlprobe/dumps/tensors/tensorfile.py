"""A tensor in a ``.pt`` or ``.npy`` file, mapped and checked, given out in blocks.

Files may come from anybody: sizes are checked against the file before anything is allocated, and
what is refused is refused with its reason. A ``.pt`` entry's CRC-32 is checked on request only
(torch does not check it either): it costs more than the comparison, and a flipped bit shows up as
a difference, never as agreement.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlprobe.documents import npyfile
from rlprobe.dumps.tensors import tensorpickle, zipentries
from rlprobe.dumps.tensors.dtypes import DTYPES, Array, DType

#: A tensor with more elements than its storage (an expanded one) is read up to this many.
MAX_EXPANDED = 1 << 31


class TensorFileError(ValueError):
    """A tensor file is missing, damaged, or not a tensor; the message says which and how."""


@dataclass(frozen=True)
class TensorFile:
    """One tensor. ``elements`` is its storage as raw elements, mapped read-only."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    elements: Array
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    def blocks(self, size: int) -> Iterator[Array]:
        """Raw elements in row-major order, at most ``size`` at a time."""
        if self.contiguous:
            flat = self.elements[self.offset : self.offset + self.size]
            for start in range(0, len(flat), size):
                yield flat[start : start + size]
            return
        yield from _blocks(self.view(), size)

    def view(self) -> Array:
        """The raw elements as an array of the tensor's shape, nothing copied."""
        item = self.elements.itemsize
        view: Array = np.lib.stride_tricks.as_strided(
            self.elements[self.offset :],
            self.shape,
            tuple(stride * item for stride in self.strides),
            writeable=False,
        )
        return view


def _blocks(view: Array, size: int) -> Iterator[Array]:
    """Consecutive pieces of a strided view, copied; split along the first axes that need it."""
    if view.size <= size or view.ndim == 0:
        yield np.ascontiguousarray(view).reshape(-1)
        return
    inner = view.size // len(view)
    if inner > size:
        for part in view:
            yield from _blocks(part, size)
        return
    rows = max(1, size // inner)
    for start in range(0, len(view), rows):
        yield np.ascontiguousarray(view[start : start + rows]).reshape(-1)


def read_tensor(data: memoryview, name: str, check_crc: bool = False) -> TensorFile:
    """A tensor from a file's bytes; ``name`` tells the format by its suffix.

    Raises:
        TensorFileError: with the reason.
    """
    try:
        return _npy(data) if name.endswith(".npy") else read_pt(data, check_crc)
    except (ValueError, OverflowError, EOFError) as error:
        raise TensorFileError(str(error)) from error


def map_file(path: Path) -> memoryview:
    """A file's bytes, mapped read-only.

    Raises:
        TensorFileError: it is missing, empty or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise TensorFileError("file is missing") from None
    except OSError as error:
        raise TensorFileError(f"cannot be opened: {error.strerror}") from error
    try:
        if os.fstat(descriptor).st_size == 0:
            raise TensorFileError("file is empty")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise TensorFileError(f"cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)


def read_pt(data: memoryview, check_crc: bool = False) -> TensorFile:
    """A tensor from the bytes of a ``.pt`` file.

    Raises:
        ValueError: with the reason.
    """
    archive = Archive.open(data, zipentries.MAX_ENTRIES, check_crc)
    if len(archive.pickle) > tensorpickle.MAX_BYTES:
        raise ValueError("its pickle is too long for one tensor")
    return archive.tensor(tensorpickle.parse(bytes(archive.pickle)))


@dataclass(frozen=True)
class Archive:
    """What ``torch.save`` wrote: a pickle, and the storages of the tensors in it."""

    data: memoryview
    pickle: memoryview
    entries: dict[str, zipentries.Entry]
    prefix: str
    check_crc: bool

    @classmethod
    def open(cls, data: memoryview, most: int, check_crc: bool = False) -> Archive:
        """Find the parts of a file.

        Args:
            data: the file.
            most: entries that are read.
            check_crc: check each storage that is used.

        Raises:
            ValueError: it is no file of ``torch.save``, or damaged.
        """
        entries = zipentries.entries(data, most)
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("no data.pkl in it: not a file torch.save wrote")
        prefix = pickles[0][: -len("data.pkl")]
        order = entries.get(f"{prefix}byteorder")
        if order is not None and bytes(data[order.start : order.stop]) != b"little":
            raise ValueError("it was written on a big-endian machine")
        entry = entries[pickles[0]]
        return cls(data, data[entry.start : entry.stop], entries, prefix, check_crc)

    def tensor(self, layout: tensorpickle.Layout) -> TensorFile:
        """A tensor of the pickle over its storage.

        Raises:
            ValueError: the storage is missing, damaged or too small.
        """
        storage = self.entries.get(f"{self.prefix}data/{layout.storage}")
        if storage is None:
            raise ValueError(f"storage {layout.storage!r:.40} is missing from it")
        raw = self.data[storage.start : storage.stop]
        if self.check_crc and zlib.crc32(raw) != storage.crc32:
            raise ValueError("CRC-32 of its storage is wrong: the file is damaged")
        dtype = DTYPES[layout.dtype]
        if layout.storage_size * dtype.size > len(raw):
            raise ValueError(
                f"its storage should hold {layout.storage_size} elements, {len(raw)} bytes are "
                "there"
            )
        return over(dtype, layout.shape, layout.strides, raw, layout.offset)


def over(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], raw: Any, offset: int
) -> TensorFile:
    """A tensor over the bytes of a storage; strides and offset in elements.

    Raises:
        ValueError: it reaches outside the storage, or claims far more elements than that has.
    """
    elements = np.frombuffer(raw, dtype=dtype.raw, count=len(raw) // dtype.size)
    size = math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if size and last >= len(elements):
        raise ValueError("its strides reach beyond its storage")
    if size > max(len(elements), MAX_EXPANDED):
        raise ValueError(f"it claims {size} elements over a storage of {len(elements)}")
    return TensorFile(dtype, shape, strides, elements, offset)


def _npy(data: memoryview) -> TensorFile:
    """numpy's own format, versions 1 to 3; object arrays (pickles) are refused."""
    head = npyfile.header(data)
    kind, shape = head.dtype, head.shape
    name = kind.newbyteorder("=").name
    if name not in DTYPES or kind.newbyteorder("<") != kind:
        raise ValueError(f"element type {kind} is not accepted")
    dtype = DTYPES[name]
    steps = [1]
    for length in shape[:-1] if head.fortran else reversed(shape[1:]):
        steps.append(steps[-1] * length)
    strides = tuple(steps if head.fortran else reversed(steps)) if shape else ()
    return over(dtype, shape, strides, data[head.start :], 0)
