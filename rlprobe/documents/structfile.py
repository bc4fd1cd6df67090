"""Reads rlprobe's own JSON into typed structs: within limits, of a known version, or one error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlprobe import formats
from rlprobe.documents.limits import DocumentError, read_bytes

#: Results have kilobytes; what is larger is none.
MAX_BYTES = 64 << 20
T = TypeVar("T")


def load(
    path: Path,
    kind: type[T],
    known: tuple[int, ...] = (1,),
    *,
    most: int = MAX_BYTES,
    unmarked: int | None = None,
) -> T:
    """The struct in a file; arguments as :func:`parse`'s.

    Raises:
        DocumentError: the file cannot be read or is larger than ``most`` bytes, or :func:`parse`
            refuses it.
        DumpError: it is of another version.
    """
    data = read_bytes(path, most)
    try:
        return parse(data, kind, known, str(path), unmarked=unmarked)
    except DocumentError as error:
        raise DocumentError(f"is not readable: {error}") from error


def parse(
    data: bytes,
    kind: type[T],
    known: tuple[int, ...],
    where: str,
    *,
    unmarked: int | None = None,
    renew: Callable[[dict[str, Any]], None] | None = None,
) -> T:
    """The struct that a JSON text stands for.

    Args:
        data: its UTF-8 bytes.
        kind: a struct with a field ``format``.
        known: versions that are read, in order; the struct is of the last.
        where: the file, as messages name it.
        unmarked: version of a file that names none; None: there is no such version.
        renew: brings an older version's mapping to the last one.

    Raises:
        DocumentError: it is not JSON, or not such a struct.
        DumpError: it is of another version.
    """
    try:
        raw = msgspec.json.decode(data)
        said = raw.get("format", unmarked) if isinstance(raw, dict) else None
        if formats.check(said, known, where) != known[-1] and renew is not None:
            renew(raw)
        return msgspec.convert(raw, kind, str_keys=True)
    # a struct's own checks raise ValueError
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise DocumentError(str(error)) from error
