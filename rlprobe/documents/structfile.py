"""rlprobe's own JSON of typed structs: read within limits, of a known version, and sealed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlprobe import formats
from rlprobe.documents import seal
from rlprobe.documents.limits import DocumentError, read_bytes

#: Results have kilobytes; what is larger is none.
MAX_BYTES = 64 << 20
T = TypeVar("T", bound=msgspec.Struct)
_log = logging.getLogger(__name__)


def encoded(value: Any) -> bytes:
    """The bytes of a file that holds a struct, or its plain data, and their digest.

    What no UTF-8 holds, as in the name of a file from a site with another encoding, is written out.
    """
    try:
        text = msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = msgspec.json.encode(_written_out(msgspec.to_builtins(value, str_keys=True)))
    # as the file will say it: what JSON has no number for becomes null
    said = msgspec.json.decode(text)
    return msgspec.json.format(msgspec.json.encode(seal.sealed(said)), indent=1) + b"\n"


def _written_out(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_written_out(key): _written_out(inner) for key, inner in value.items()}
    return [_written_out(inner) for inner in value] if isinstance(value, list) else value


def load(
    path: Path,
    kind: type[T],
    known: tuple[int, ...] = (1,),
    *,
    most: int = MAX_BYTES,
    unmarked: int | None = None,
    again: str = "",
) -> T:
    """The struct in a file; arguments as :func:`parse`'s.

    Raises:
        DocumentError: the file cannot be read or is larger than ``most`` bytes, or :func:`parse`
            refuses it.
        DumpError: it is of another version, or was changed.
    """
    data = read_bytes(path, most)
    try:
        return parse(data, kind, known, str(path), unmarked=unmarked, again=again)
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
    again: str = "",
) -> T:
    """The struct that a JSON text stands for.

    Args:
        data: its UTF-8 bytes.
        kind: a struct with a field ``format``.
        known: versions that are read, in order; the struct is of the last.
        where: the file, as messages name it.
        unmarked: version of a file that names none; None: there is no such version.
        renew: brings an older version's mapping to the last one.
        again: how the file is made again, for messages.

    Raises:
        DocumentError: it is not JSON, or not such a struct.
        DumpError: it is of another version, or is not what was written.
    """
    try:
        raw = msgspec.json.decode(data)
        said = raw.get("format", unmarked) if isinstance(raw, dict) else None
        version = formats.check(said, known, where)
        if not seal.check(raw, kind.__struct_fields__, where, again):
            _log.info("%s carries no digest: nothing shows whether it was changed", where)
        if version != known[-1] and renew is not None:
            renew(raw)
        return msgspec.convert(raw, kind, str_keys=True)
    # a struct's own checks raise ValueError
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise DocumentError(str(error)) from error
