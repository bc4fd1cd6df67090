"""Many small tensor files in one stored zip, so that they don't exhaust a file system's inodes.

A ``dump_tensor_data.zip`` beside dump.json holds the files of ``dump_tensor_data/`` below 1 MiB,
uncompressed, in order of their names, each beginning on a 64-byte boundary so that its tensor can
be mapped in place. The same files give the same bytes. ``store tree`` unpacks it for msprobe.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rlprobe.errors import StoreError
from rlprobe.files import digest
from rlprobe.store.objects import Stored

SUFFIX = ".zip"
SMALL = 1 << 20
_ALIGNMENT = 64
_LOCAL_HEADER = 30
#: Zip's identifier for padding in an extra field (Android's zipalign).
_PADDING = 0xD935


class Member(NamedTuple):
    """A packed file: its name, its content, and where in the zip that content begins."""

    name: str
    stored: Stored
    offset: int


def pack(files: Iterable[Path], target: Path) -> list[Member]:
    """Write a new zip of the files, named by their base names, in order."""
    members = []
    with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for path in sorted(files, key=lambda path: path.name):
            entry = zipfile.ZipInfo(path.name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o444 << 16
            start = archive.fp.tell() + _LOCAL_HEADER + len(path.name.encode())  # type: ignore[union-attr]
            padding = -(start + 4) % _ALIGNMENT
            entry.extra = struct.pack("<HH", _PADDING, padding) + bytes(padding)
            archive.writestr(entry, path.read_bytes())
            members.append(Member(path.name, digest(path), start + 4 + padding))
    return members


def unpack(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a zip written by :func:`pack`, one by one.

    Raises:
        StoreError: it is no such zip: unreadable, compressed, too large, or with names that would
            leave a directory.
    """
    try:
        with zipfile.ZipFile(archive) as source:
            entries = source.infolist()
            # Members that share bytes would unpack to far more than the file holds.
            if sum(entry.file_size for entry in entries) > archive.stat().st_size:
                raise StoreError(f"{archive}: its members claim more bytes than it holds")
            for entry in entries:
                if "/" in entry.filename or entry.filename in ("", ".", ".."):
                    raise StoreError(f"{archive}: member {entry.filename!r} is no plain file name")
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size >= SMALL:
                    raise StoreError(f"{archive}: member {entry.filename!r} is not stored as it is")
                yield entry.filename, source.read(entry)
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise StoreError(f"{archive} is not a readable zip: {error}") from error
