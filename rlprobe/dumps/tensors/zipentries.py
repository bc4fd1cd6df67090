"""Stored entries of a zip archive, found without copying or unpacking anything.

torch's ``.pt`` files are zips whose entries are stored, so a tensor's bytes are a slice of the
file. Only that is read here (PKWARE APPNOTE 4.3, with zip64): anything compressed, encrypted,
overlapping or out of bounds is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 1 << 16
#: A tensor file has a handful of entries.
MAX_ENTRIES = 4096


@dataclass(frozen=True)
class Entry:
    """A stored entry: ``data[start:stop]`` of the file are its bytes."""

    start: int
    stop: int
    crc32: int


def entries(data: memoryview, most: int = MAX_ENTRIES) -> dict[str, Entry]:
    """Entries by name, at most so many.

    Raises:
        ValueError: not a zip of stored entries, or damaged.
    """
    count, size, offset = _directory(data)
    if count > most:
        raise ValueError(f"{count} zip entries, at most {most} are read")
    if offset + size > len(data):
        raise ValueError("the zip directory lies beyond the end of the file: it is truncated")
    found: dict[str, Entry] = {}
    at = offset
    for _ in range(count):
        if at + _CENTRAL.size > offset + size:
            raise ValueError("the zip directory is cut short")
        fields = _CENTRAL.unpack_from(data, at)
        if fields[0] != b"PK\x01\x02":
            raise ValueError("the zip directory is damaged")
        flags, method, crc, packed, plain = fields[3], fields[4], fields[7], fields[8], fields[9]
        name_size, extra_size, comment_size, local = fields[10], fields[11], fields[12], fields[16]
        name_at = at + _CENTRAL.size
        name = bytes(data[name_at : name_at + name_size]).decode("utf-8", "strict")
        extra = data[name_at + name_size : name_at + name_size + extra_size]
        plain, packed, local = _zip64(extra, plain, packed, local)
        if method != 0 or packed != plain or flags & 1:
            raise ValueError(f"zip entry {name!r:.60} is compressed or encrypted")
        if name in found:
            raise ValueError(f"zip entry {name!r:.60} exists twice")
        found[name] = _located(data, local, plain, crc, name)
        at = name_at + name_size + extra_size + comment_size
    return found


def _directory(data: memoryview) -> tuple[int, int, int]:
    """Number of entries, size and offset of the central directory."""
    tail_at = max(0, len(data) - _END.size - _MAX_COMMENT)
    tail = bytes(data[tail_at:])
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise ValueError("no zip directory: the file is truncated or no tensor file")
    end = _END.unpack_from(tail, at)
    count, size, offset = end[4], end[5], end[6]
    locator_at = tail_at + at - _END64_LOCATOR.size
    if 0xFFFF in (count,) or 0xFFFFFFFF in (size, offset):
        if locator_at < 0:
            raise ValueError("the zip64 locator is missing")
        locator = _END64_LOCATOR.unpack_from(data, locator_at)
        if locator[0] != b"PK\x06\x07" or locator[2] + _END64.size > len(data):
            raise ValueError("the zip64 locator is damaged")
        wide = _END64.unpack_from(data, locator[2])
        if wide[0] != b"PK\x06\x06":
            raise ValueError("the zip64 directory is damaged")
        count, size, offset = wide[7], wide[8], wide[9]
    return count, size, offset


def _zip64(extra: memoryview, plain: int, packed: int, local: int) -> tuple[int, int, int]:
    values = [plain, packed, local]
    wanted = [n for n, value in enumerate(values) if value == 0xFFFFFFFF]
    at = 0
    while wanted and at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            if size < 8 * len(wanted) or at + 4 + size > len(extra):
                raise ValueError("a zip64 field is cut short")
            for n, value in zip(
                wanted, struct.unpack_from(f"<{len(wanted)}Q", extra, at + 4), strict=True
            ):
                values[n] = value
            break
        at += 4 + size
    return values[0], values[1], values[2]


def _located(data: memoryview, local: int, size: int, crc: int, name: str) -> Entry:
    if local + _LOCAL.size > len(data):
        raise ValueError(f"zip entry {name!r:.60} lies beyond the end of the file")
    header = _LOCAL.unpack_from(data, local)
    if header[0] != b"PK\x03\x04":
        raise ValueError(f"zip entry {name!r:.60} has no header")
    start = local + _LOCAL.size + header[9] + header[10]
    if start + size > len(data):
        raise ValueError(f"zip entry {name!r:.60} is truncated")
    return Entry(start, start + size, crc)
