"""numpy's ``.npy`` files of plain numbers, their header read without Python's own parser.

numpy evaluates the header as a Python literal, which costs time and memory without bound and ends
in errors of every kind. Here it is matched: a number type, an order and a shape, as every writer of
the format puts them down (NEP 1, versions 1 to 3). Structures, texts and objects are refused.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlprobe.documents.limits import DocumentError, read_bytes

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1 << 16
_MAX_AXES = 64
#: Longest axis of an array without elements, which no file's size bounds.
_MAX_EMPTY = 1 << 20
_HEADER = re.compile(
    rb"\{\s*'descr':\s*'([<>|=]?[biufc][0-9]{1,2}|[<>|=]?\?)',\s*"
    rb"'fortran_order':\s*(True|False),\s*"
    rb"'shape':\s*\(((?:[0-9]{1,18}L?,\s*)*(?:[0-9]{1,18}L?)?)\),?\s*\}\s*"
)


@dataclass(frozen=True)
class Header:
    """What a file says of its array; the elements begin at byte ``start``."""

    dtype: np.dtype[np.generic]
    fortran: bool
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)


def header(data: bytes | memoryview) -> Header:
    """The header of a file's bytes, of which the first 64 KiB are looked at.

    Raises:
        DocumentError: not of the format, or not of plain numbers.
    """
    head = bytes(data[: _MAX_HEADER + 12])
    if head[:6] != _MAGIC or len(head) < 12:
        raise DocumentError("not a .npy file: it does not begin as one")
    version = head[6], head[7]
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise DocumentError(f"npy version {version[0]}.{version[1]} is not known; accepted: 1 to 3")
    form, start = ("<H", 10) if version == (1, 0) else ("<I", 12)
    (length,) = struct.unpack_from(form, head, 8)
    if length > _MAX_HEADER or start + length > len(head):
        raise DocumentError(f"its header has {length} bytes, which are not there or too many")
    text = head[start : start + length]
    found = _HEADER.fullmatch(text)
    if found is None:
        raise DocumentError(f"its header is not one of plain numbers: {text[:60]!r}")
    try:
        dtype = np.dtype(found[1].decode("ascii"))
    except TypeError as error:
        raise DocumentError(f"element type {found[1].decode('ascii')!r} is not known") from error
    shape = tuple(int(n.rstrip(b"L")) for n in re.findall(rb"[0-9]+L?", found[3]))
    if len(shape) > _MAX_AXES:
        raise DocumentError(f"it has {len(shape)} axes; accepted: {_MAX_AXES}")
    return Header(dtype, found[2] == b"True", shape, start + length)


def load(path: str | os.PathLike[str], most: int) -> npt.NDArray[np.generic]:
    """The array in a file of at most ``most`` bytes.

    Raises:
        DocumentError: unreadable, too large, cut short, or :func:`header` refuses it.
    """
    data = read_bytes(path, most)
    head = header(data)
    if max(head.shape, default=0) > max(len(data), _MAX_EMPTY):
        raise DocumentError(f"its shape {list(head.shape)} is of nothing, too many times")
    if head.size * head.dtype.itemsize != len(data) - head.start:
        raise DocumentError(
            f"its shape {list(head.shape)} takes {head.size * head.dtype.itemsize} bytes, "
            f"{len(data) - head.start} are there"
        )
    flat = np.frombuffer(data, head.dtype, head.size, head.start)
    return flat.reshape(head.shape, order="F" if head.fortran else "C")
