"""Reads a bundle from its beginning to its end."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from rlprobe.errors import StoreError
from rlprobe.store import bundle
from rlprobe.store.manifest import MAX_BYTES, Manifest
from rlprobe.store.objects import Objects, Stored

_CHUNK = 1 << 20


class Reader:
    """Reads a bundle from its beginning, accepting what export writes and nothing else."""

    def __init__(self, file: BinaryIO, archive: Path) -> None:
        self.file = file
        self.archive = archive

    def fail(self, what: str) -> StoreError:
        return StoreError(f"{self.archive}: {what}")

    def index(self) -> bundle.Index:
        head = self.file.read(bundle.BLOCK)
        # Its size is known from its header alone; everything else is known from it.
        try:
            size = int(head[124:135], 8)
        except ValueError:
            size = -1
        wanted = bundle.Member(bundle.INDEX, Stored("", max(size, 0)))
        if size <= 0 or head != bundle.header(*self._named(wanted)):
            if not head.startswith(bundle.INDEX.encode() + b"\0"):
                raise self.fail("this is not a bundle that `rlprobe store export` wrote")
            raise self.fail(bundle.complaint(head, wanted))
        if size > MAX_BYTES:
            raise self.fail(f"its index claims {size} bytes, more than any bundle has")
        return bundle.Index.from_bytes(self._content(bundle.INDEX, size), str(self.archive))

    def manifest(self, run: bundle.RunEntry) -> tuple[Manifest, bytes]:
        member = bundle.Member(f"runs/{run.key}/manifest.json", Stored(run.sha256, run.size))
        self._header(member)
        data = self._content(member.name, run.size)
        found = hashlib.sha256(data).hexdigest()
        if found != run.sha256:
            raise self.fail(f"{member.name} has digest {found}, not {run.sha256}")
        manifest = Manifest.from_bytes(data, f"{self.archive}: {member.name}")
        if manifest.key != run.key:
            raise self.fail(f"{member.name} is the manifest of run {manifest.key}")
        return manifest, data

    def store(self, entry: bundle.ObjectEntry, objects: Objects) -> None:
        stored = Stored(entry.sha256, entry.size)
        member = bundle.Member(f"objects/{entry.sha256}", stored)
        self._header(member)
        if objects.intact(stored):
            self._verify(member)
        else:
            try:
                objects.put_stream(self.file, stored)
            except StoreError as error:
                raise self.fail(str(error)) from error
        self._padding(member.name, entry.size)

    def skip(self, entry: bundle.ObjectEntry) -> None:
        """Pass an object by, unread."""
        self._header(bundle.Member(f"objects/{entry.sha256}", Stored(entry.sha256, entry.size)))
        self.file.seek(entry.size + len(bundle.padding(entry.size)), os.SEEK_CUR)

    def finish(self) -> None:
        if self.file.read(len(bundle.END)) != bundle.END:
            raise self.fail("its end is missing; was it carried completely?")
        if self.file.read(1):
            raise self.fail("something follows its end, which is refused")

    def _verify(self, member: bundle.Member) -> None:
        """Read an object that the store has already: a damaged bundle is refused all the same."""
        state = hashlib.sha256()
        left = member.stored.size
        while left:
            chunk = self.file.read(min(_CHUNK, left))
            if not chunk:
                raise self.fail(f"{member.name} ends early; was the file carried completely?")
            state.update(chunk)
            left -= len(chunk)
        if state.hexdigest() != member.stored.sha256:
            raise self.fail(f"{member.name} has digest {state.hexdigest()}")

    def _header(self, member: bundle.Member) -> None:
        found = self.file.read(bundle.BLOCK)
        if found != bundle.header(*self._named(member)):
            raise self.fail(bundle.complaint(found, member))

    def _content(self, name: str, size: int) -> bytes:
        data = self.file.read(size)
        if len(data) < size:
            raise self.fail(f"{name} ends early; was the file carried completely?")
        self._padding(name, size)
        return data

    def _padding(self, name: str, size: int) -> None:
        filling = bundle.padding(size)
        if self.file.read(len(filling)) != filling:
            raise self.fail(f"{name} is not filled up to its last block")

    @staticmethod
    def _named(member: bundle.Member) -> tuple[str, int]:
        return member.name, member.stored.size
