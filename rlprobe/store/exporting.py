"""``rlprobe store export``: runs into a bundle."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlprobe.errors import StoreError
from rlprobe.files import sync
from rlprobe.store import bundle, locks, read
from rlprobe.store.manifest import NAME
from rlprobe.store.objects import Objects, Stored

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Exported:
    """A bundle that was written."""

    path: Path
    #: Digest of the whole file, to be carried by another way and given to import.
    sha256: str
    size: int
    index: bundle.Index
    #: Bytes that an interrupted export had written already.
    resumed: int


def export(store: Path, prefixes: Iterable[str], target: Path) -> Exported:
    """Write runs into a bundle at ``target``.

    An interrupted export leaves ``{target}.part``; the next one checks what it holds and goes on
    from there. The same runs give the same bytes.

    Args:
        store: the store's directory.
        prefixes: keys of the runs, or their beginnings.
        target: the file to write.

    Raises:
        StoreError: a run or object is missing or damaged, or the target exists or lies in the
            store.
    """
    read.require_outside(store, target)
    if target.exists():
        raise StoreError(f"{target} exists; remove it, or choose another name")
    part = target.with_name(target.name + ".part")
    with locks.shared(store):
        index, contents = _contents(store, prefixes)
        with part.open("a+b") as file:
            locks.claim(file.fileno(), str(part))
            writer = _Writer(file)
            for member, opened in contents:
                writer.add(member, opened)
            writer.finish()
        resumed, size, digest = writer.resumed, writer.position, writer.state.hexdigest()
    sync(part)
    part.rename(target)
    sync(target.absolute().parent)
    return Exported(target, digest, size, index, resumed)


_Content = tuple[bundle.Member, Callable[[], BinaryIO]]


def _contents(store: Path, prefixes: Iterable[str]) -> tuple[bundle.Index, list[_Content]]:
    objects = Objects(store)
    needed: set[Stored] = set()
    runs: list[bundle.RunEntry] = []
    manifests: dict[str, bytes] = {}
    for key in sorted({read.resolve(store, prefix) for prefix in prefixes}):
        run = read.Run.open(store, key)
        data = (run.path / NAME).read_bytes()
        manifests[key] = data
        digest = hashlib.sha256(data).hexdigest()
        runs.append(bundle.RunEntry(key=key, sha256=digest, size=len(data)))
        needed.update(Stored(file.sha256, file.size) for file in run.manifest.files)
    index = bundle.index_of(runs, needed)
    head = index.to_bytes()
    contents: list[_Content] = [
        (
            bundle.Member(bundle.INDEX, Stored(hashlib.sha256(head).hexdigest(), len(head))),
            lambda: io.BytesIO(head),
        )
    ]
    for member in index.members():
        kind, _, rest = member.name.partition("/")
        if kind == "runs":
            data = manifests[rest.partition("/")[0]]
            contents.append((member, lambda data=data: io.BytesIO(data)))  # type: ignore[misc]
        else:
            path = objects.path(member.stored.sha256)
            if not objects.has(member.stored):
                raise StoreError(f"object {path} is missing or truncated; run store verify")
            contents.append((member, lambda path=path: path.open("rb")))  # type: ignore[misc]
    return index, contents


class _Writer:
    """Appends members to a file, or recognises them where an earlier export wrote them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.state = hashlib.sha256()
        self.position = 0
        self.resumed = 0
        self._resuming = True
        file.seek(0)

    def add(self, member: bundle.Member, opened: Callable[[], BinaryIO]) -> None:
        head = bundle.header(member.name, member.stored.size)
        length = len(head) + member.stored.size
        length += len(bundle.padding(member.stored.size))
        if self._resuming:
            if self._recognise(member, head):
                self.position += length
                self.resumed = self.position
                return
            self._resuming = False
            self.file.truncate(self.position)
        self._write(head)
        state = hashlib.sha256()
        size = 0
        with opened() as source:
            while chunk := source.read(_CHUNK):
                self._write(chunk)
                state.update(chunk)
                size += len(chunk)
        if Stored(state.hexdigest(), size) != member.stored:
            raise StoreError(f"{member.name} is damaged in the store; run `rlprobe store verify`")
        self._write(bundle.padding(size))
        self.position += length

    def _recognise(self, member: bundle.Member, head: bytes) -> bool:
        """Whether the file holds this member, whole and right, where it should."""
        state = self.state.copy()
        if self.file.read(bundle.BLOCK) != head:
            return False
        state.update(head)
        content = hashlib.sha256()
        left = member.stored.size
        while left:
            chunk = self.file.read(min(_CHUNK, left))
            if not chunk:
                return False
            content.update(chunk)
            state.update(chunk)
            left -= len(chunk)
        filling = bundle.padding(member.stored.size)
        if content.hexdigest() != member.stored.sha256 or self.file.read(len(filling)) != filling:
            return False
        state.update(filling)
        self.state = state
        return True

    def finish(self) -> None:
        if self._resuming:
            self.file.truncate(self.position)
        self._write(bundle.END)
        self.position += len(bundle.END)
        self.file.flush()
        os.fsync(self.file.fileno())

    def _write(self, data: bytes) -> None:
        # The file is in append mode: after truncation its end is where writing goes on.
        self.file.write(data)
        self.state.update(data)


def describe(exported: Exported) -> dict[str, Any]:
    """An export, for machines."""
    return {
        "file": str(exported.path),
        "digest": f"sha256:{exported.sha256}",
        "size": exported.size,
        "resumed": exported.resumed,
        **bundle.describe(exported.index),
    }
