"""``rlprobe store import``: a bundle's runs into a store."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rlprobe.errors import StoreError
from rlprobe.store import bundle
from rlprobe.store.alignments import record_alignment
from rlprobe.store.filetypes import check_type
from rlprobe.store.manifest import MAX_BYTES, NAME, Manifest
from rlprobe.store.objects import Objects, Stored, digest_file
from rlprobe.store.publish import Tree
from rlprobe.store.workspace import workspace

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Imported:
    """What an import brought."""

    #: Keys of the runs that are in the store now, whether they were before or not.
    keys: list[str]
    new_runs: int
    new_bytes: int
    #: Name under which the runs are kept from garbage collection.
    alignment: str


def import_bundle(
    store: Path, archive: Path, *, digest: str | None = None, replace: bool = False
) -> Imported:
    """Bring a bundle's runs into a store.

    Everything is checked first; the runs appear at the end, each whole. An interrupted or refused
    import leaves no run; its verified objects stay, so that the next one writes only the others.

    Args:
        store: the store's directory; made if need be.
        archive: a file that ``store export`` wrote.
        digest: ``sha256:…`` of the whole file, as export printed it; None checks the parts only.
        replace: take the bundle's runs where the store has other ones with the same keys.

    Raises:
        StoreError: the file is not a bundle, incomplete, damaged, or has anything in it that does
            not belong there; or the store has a different run with one of its keys.
    """
    if not stat.S_ISREG(_stat(archive).st_mode):
        raise StoreError(f"{archive} is not a plain file")
    if digest is not None:
        found = digest_file(archive).sha256
        if found != digest.removeprefix("sha256:"):
            raise StoreError(f"{archive} has digest sha256:{found}, not {digest}")
    with archive.open("rb") as file, workspace(store) as work:
        reader = _Reader(file, archive)
        index = reader.index()
        manifests = {run.key: reader.manifest(run) for run in index.runs}
        _check_agreement(archive, index, manifests)
        _check_conflicts(store, manifests, replace)
        objects = Objects(store, work)
        try:
            for entry in index.objects:
                reader.store(entry, objects)
            reader.finish()
        finally:
            objects.flush()  # what was verified stays, whatever became of the rest
        for manifest, _ in manifests.values():
            for member in manifest.files:
                check_type(member.path, objects.path(member.sha256))
        name = f"imported-{hashlib.sha256(index.to_bytes()).hexdigest()[:16]}"
        # Before the runs appear: no alignment of this store names them yet, and gc must not take
        # them until one does.
        record_alignment(store, name, manifests)
        new = _publish(store, manifests, objects, work)
    return Imported(list(manifests), new, objects.added, name)


def _publish(
    store: Path, manifests: dict[str, tuple[Manifest, bytes]], objects: Objects, work: Path
) -> int:
    count = 0
    for number, (manifest, data) in enumerate(manifests.values()):
        if _present(store, manifest.key) == data:
            continue
        tree = Tree(work / f"run-{number}", objects)
        for file in manifest.files:
            tree.add(file.path, Stored(file.sha256, file.size))
        tree.publish(manifest.key, data, store)
        count += 1
    return count


def _present(store: Path, key: str) -> bytes | None:
    path = store / "runs" / key / NAME
    return path.read_bytes() if path.is_file() else None


def _check_agreement(
    archive: Path, index: bundle.Index, manifests: dict[str, tuple[Manifest, bytes]]
) -> None:
    """The runs' files are the bundle's objects, no more and no fewer."""
    needed = {
        Stored(file.sha256, file.size)
        for manifest, _ in manifests.values()
        for file in manifest.files
    }
    offered = {Stored(entry.sha256, entry.size) for entry in index.objects}
    for stored in sorted(needed - offered):
        raise StoreError(f"{archive}: object {stored.sha256} of {stored.size} bytes is not in it")
    for stored in sorted(offered - needed):
        raise StoreError(f"{archive}: object {stored.sha256} belongs to none of its runs")


def _check_conflicts(
    store: Path, manifests: dict[str, tuple[Manifest, bytes]], replace: bool
) -> None:
    for key, (_, data) in manifests.items():
        present = _present(store, key)
        if present not in (None, data) and not replace:
            raise StoreError(
                f"{store} has a run {key[:12]} already, made elsewhere or at another time; pass "
                "--replace to take the bundle's instead"
            )


def _stat(archive: Path) -> os.stat_result:
    try:
        return archive.stat()
    except FileNotFoundError as error:
        raise StoreError(f"{archive} does not exist") from error


class _Reader:
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
        if objects.has(stored):
            self._verify(member)
        else:
            try:
                objects.put_stream(self.file, stored)
            except StoreError as error:
                raise self.fail(str(error)) from error
        self._padding(member.name, entry.size)

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
