"""Content-addressed files: ``{store}/objects/sha256/ab/{digest}``, written once, never changed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlprobe.errors import StoreError
from rlprobe.files import Digest, digest, sync, sync_all

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20
#: How NFS names a deleted file that is still open.
NFS = ".nfs"
_READ_ONLY = 0o444
#: Bytes and files that may wait to be flushed; an interrupted import loses no more than these.
_MOST_PENDING = 256 << 20
_MOST_FILES = 4096
#: Why a hard link may be refused: another file system, another owner (fs.protected_hardlinks), too
#: many links, or a file system without them.
_LINK_REFUSED = {
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.EMLINK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
}


#: An object: its digest and its size in bytes.
Stored = Digest


class Objects:
    """The objects of one store.

    Safe for any number of processes at once: an object appears whole, under the name of its
    content. New ones wait in the workspace for :meth:`flush`, which must be called before anything
    lasting refers to them; it is called from time to time anyway.

    Args:
        store: the store's directory.
        workspace: a directory on the same file system for what is being written; None for reading.
    """

    def __init__(self, store: Path, workspace: Path | None = None) -> None:
        self.root = store / "objects" / "sha256"
        self._workspace = workspace
        self._pending: dict[Stored, Path] = {}
        self._pending_bytes = 0
        self._count = 0
        self._intact: set[Stored] = set()
        #: Bytes of objects that were not there before.
        self.added = 0
        #: Objects that were there with another content than their name's, and have it again.
        self.healed: list[Stored] = []

    def path(self, digest: str) -> Path:
        """Where an object lies, or would lie.

        Raises:
            StoreError: the digest is not 64 hexadecimal digits.
        """
        if not _DIGEST.fullmatch(digest):
            raise StoreError(f"{digest!r} is not a sha256 digest (64 hexadecimal digits)")
        return self.root / digest[:2] / digest

    def has(self, stored: Stored) -> bool:
        """Whether the object is there with its size; :meth:`intact` reads the content as well."""
        if stored in self._pending:
            return True
        try:
            found = self.path(stored.sha256).stat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == stored.size

    def intact(self, stored: Stored) -> bool:
        """Whether the object is there with its content, which is read once.

        Nothing new may refer to one that is only there by its name and size.
        """
        if stored in self._pending or stored in self._intact:
            return True
        if not self.has(stored):
            return False
        try:
            good = digest(self.path(stored.sha256)) == stored
        except OSError:
            good = False
        if good:
            self._intact.add(stored)
        return good

    def put_bytes(self, data: bytes) -> Stored:
        """Store bytes."""
        stored = Stored(hashlib.sha256(data).hexdigest(), len(data))
        if not self.intact(stored):
            temporary = self._temporary()
            with temporary.open("xb") as handle:
                handle.write(data)
            self._add(temporary, stored)
        return stored

    def put_file(self, path: Path, *, adopt: bool = False) -> Stored:
        """Store a file's content; the file stays.

        Args:
            path: a regular file that nobody writes to any more.
            adopt: link the file itself into the store where that is possible, instead of copying
                it. It becomes read-only, and writing to it later would damage the store: for files
                in scratch space that is about to be deleted.

        Raises:
            StoreError: the file changes while it is read.
        """
        stored = digest(path)
        if self.intact(stored):
            return stored
        temporary = self._temporary()
        # Only the owner may make it read-only, whatever the file system lets others link.
        if adopt and path.stat().st_uid == os.geteuid() and linked(path, temporary):
            found = digest(temporary)
        else:
            with path.open("rb") as source, temporary.open("xb") as target:
                found = _copy(source, target)
        if found != stored:
            temporary.unlink()
            raise StoreError(f"{path} changed while it was stored; is a process still writing it?")
        self._add(temporary, stored)
        return stored

    def put_stream(self, source: BinaryIO, expected: Stored) -> None:
        """Store exactly the next ``expected.size`` bytes of a stream.

        Raises:
            StoreError: the stream ends early, or the bytes have another digest; nothing is stored.
        """
        temporary = self._temporary()
        with temporary.open("xb") as target:
            found = _copy(source, target, expected.size)
        if found != expected:
            temporary.unlink()
            what = "ends early" if found.size < expected.size else f"holds {found.sha256}"
            raise StoreError(f"object {expected.sha256}: the source {what}")
        if self.intact(expected):
            temporary.unlink()
        else:
            self._add(temporary, expected)

    def where(self, stored: Stored) -> Path:
        """Where an object's bytes are now, waiting or stored."""
        return self._pending.get(stored) or self.path(stored.sha256)

    def link(self, stored: Stored, destination: Path) -> None:
        """Give an object a second name; a copy where the file system refuses hard links.

        Raises:
            StoreError: the object is missing or of another size.
        """
        if not self.has(stored):
            raise StoreError(
                f"object {stored.sha256} is missing or cut short in {self.root}; `rlprobe store "
                "verify` says how to mend it"
            )
        source = self.where(stored)
        if not linked(source, destination):
            with source.open("rb") as reader, destination.open("xb") as writer:
                _copy(reader, writer)
            destination.chmod(_READ_ONLY)
            sync(destination)

    def flush(self) -> None:
        """Flush new objects to the disk, then give them their names, then flush the names."""
        sync_all(self._pending.values())
        directories: set[Path] = set()
        for stored, temporary in self._pending.items():
            final = self.path(stored.sha256)
            if not final.parent.is_dir():
                final.parent.mkdir(parents=True, exist_ok=True)
                directories.update((final.parent.parent, final.parent.parent.parent))
            # Replacing is harmless: whoever was faster put the same bytes there.
            temporary.replace(final)
            directories.add(final.parent)
        sync_all(sorted(directories))
        self._pending.clear()
        self._pending_bytes = 0

    def __iter__(self) -> Iterator[Stored]:
        """Every object there is, in order of its digest."""
        for path in self._files():
            if _DIGEST.fullmatch(path.name):
                yield Stored(path.name, path.lstat().st_size)

    def strays(self) -> Iterator[Path]:
        """What lies among the objects and is none.

        NFS leaves ``.nfs…`` where a file was deleted that a process still has open: those go by
        themselves.
        """
        for path in self._files():
            if not _DIGEST.fullmatch(path.name) and not path.name.startswith(NFS):
                yield path

    def _files(self) -> Iterator[Path]:
        for directory in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            yield from sorted(directory.iterdir()) if directory.is_dir() else [directory]

    def _temporary(self) -> Path:
        if self._workspace is None:
            raise AssertionError("these objects were opened for reading")
        self._count += 1
        return self._workspace / f"object-{self._count}"

    def _add(self, temporary: Path, stored: Stored) -> None:
        temporary.chmod(_READ_ONLY)
        if os.path.lexists(self.path(stored.sha256)):
            self.healed.append(stored)
        self._pending[stored] = temporary
        self._pending_bytes += stored.size
        self.added += stored.size
        if self._pending_bytes > _MOST_PENDING or len(self._pending) > _MOST_FILES:
            self.flush()


def _copy(source: BinaryIO, target: BinaryIO, limit: int | None = None) -> Stored:
    state = hashlib.sha256()
    size = 0
    while limit is None or size < limit:
        chunk = source.read(_CHUNK if limit is None else min(_CHUNK, limit - size))
        if not chunk:
            break
        target.write(chunk)
        state.update(chunk)
        size += len(chunk)
    return Stored(state.hexdigest(), size)


def linked(source: Path, destination: Path) -> bool:
    """Make a hard link; False where the file system, or its owner rules, refuse it."""
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in _LINK_REFUSED:
            raise
        return False
    return True
