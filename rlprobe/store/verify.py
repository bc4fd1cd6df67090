"""Is everything in a store what its name says? Whose is what is not, and how does it come back?"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rlprobe import files
from rlprobe.errors import StoreError
from rlprobe.store import alignments, assets, copies, heal, locks, read
from rlprobe.store.heal import files_of
from rlprobe.store.manifest import NAME, Manifest
from rlprobe.store.objects import NFS, Objects, Stored
from rlprobe.store.problems import (
    ASSET,
    COPY,
    EXTRA,
    GONE,
    MANIFEST,
    OBJECT,
    RECORD,
    STRAY,
    TREE,
    Problem,
    Ways,
    whose,
)

#: Hashing runs outside Python's lock; more threads than disks feed help nobody.
_THREADS = 4


@dataclass
class Verified:
    """What was looked at, and what was wrong with it."""

    runs: int = 0
    objects: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: What nothing shows a change of, as it was made by an earlier version; --repair seals it.
    unchecked: list[Path] = field(default_factory=list)
    #: What is not wrong, and should be known.
    notes: list[str] = field(default_factory=list)


def verify(store: Path, prefixes: Iterable[str] = ()) -> Verified:
    """Read every byte of some runs, or of all runs and objects, and compare digests.

    Args:
        store: the store's directory.
        prefixes: keys of runs, or their beginnings; empty for the whole store.

    Raises:
        StoreError: there is no store, or no such run.
    """
    read.require(store)
    with locks.shared(store):
        chosen = [read.resolve(store, prefix, complete=False) for prefix in prefixes]
        return _Verification(store, chosen).result()


class _Verification:
    def __init__(self, store: Path, chosen: list[str]) -> None:
        self.store = store
        self.whole = not chosen
        self.ways = Ways(store)
        self.objects = Objects(store)
        self.found = Verified()
        self.chosen = chosen or sorted({*read.keys(store, complete=False), *copies.keys(store)})

    def result(self) -> Verified:
        manifests = {key: m for key in self.chosen if (m := self._manifest(key)) is not None}
        uses = files_of(manifests.items())
        damaged = self._objects(uses, manifests)
        for key, manifest in manifests.items():
            if (self.store / "runs" / key / NAME).exists():
                self.found.problems += self._tree(key, manifest, damaged)
        if self.whole:
            self._strays()
            self._records(manifests)
            self._assets()
        return self.found

    def _problem(self, kind: str, path: Path, what: str, **more: object) -> None:
        self.found.problems.append(Problem(kind, path, what, **more))  # type: ignore[arg-type]

    def _manifest(self, key: str) -> Manifest | None:
        """A run's manifest, from its copy where it is damaged; what is wrong with it is noted."""
        run = self.store / "runs" / key
        path = run / NAME
        self.found.runs += 1
        kept = copies.intact(self.store, key)
        named = copies.digests(self.store, key)
        way = self.ways.repair()
        lost = self.ways.elsewhere({key: "ROLE"})
        of = (f"run {key[:12]}: all of it",)
        try:
            data = path.read_bytes()
        except OSError as error:
            if not run.exists() or not any(run.iterdir()):
                what = "was committed and is gone: its directory was removed, its copy is here"
                kind, path = GONE, run
            else:
                what, kind = f"cannot be read: {error.strerror or error}", MANIFEST
            self._problem(kind, path, what, of=of, way=way if kept else lost)
            return self._parsed(kept[0], path) if kept else None
        digest = hashlib.sha256(data).hexdigest()
        good = self._parsed(data, path)
        if named and digest not in named:
            # one of the two is damaged: the manifest where a copy is whole, else its copies
            if kept:
                what = f"is not what was committed: its digest is {digest}"
                self._problem(MANIFEST, path, what, of=of, way=way)
                return self._parsed(kept[0], path)
            self._problem(MANIFEST, path, "and its copy are both damaged", of=of, way=lost)
            return None
        if good is None or good.key != key:
            what = "is no manifest of this run" if good is None else f"is that of run {good.key}"
            self._problem(MANIFEST, path, what, of=of, way=way if kept else lost)
            return None
        whole = {hashlib.sha256(copy).hexdigest() for copy in kept}
        for name, copy in named.items():
            if name not in whole:
                self._problem(COPY, copy, "is not the copy that its name says", of=of, way=way)
        if not named:
            self.found.unchecked.append(path)
        return good

    def _parsed(self, data: bytes, path: Path) -> Manifest | None:
        try:
            return Manifest.from_bytes(data, str(path))
        except StoreError:
            return None

    def _objects(
        self, uses: dict[Stored, list[tuple[str, str]]], manifests: dict[str, Manifest]
    ) -> set[Stored]:
        """Digest all objects; those that are damaged or missing."""
        wanted = set(uses)
        if self.whole:
            named = {stored.sha256 for stored in wanted}
            # of one with another size than its runs list, its use is what tells
            wanted |= {stored for stored in self.objects if stored.sha256 not in named}
        damaged = set()
        with ThreadPoolExecutor(_THREADS) as threads:
            for stored, what in threads.map(self._object, sorted(wanted)):
                self.found.objects += 1
                self.found.bytes += stored.size
                if what is None:
                    continue
                damaged.add(stored)
                path = self.objects.path(stored.sha256)
                users = uses.get(stored, [])
                if not users:
                    way = f"{self.ways.repair()} removes it: no run has it"
                elif (source := self.source(stored, users)) is not None:
                    way = f"{self.ways.repair()} takes it from {source}"
                else:
                    way = self.ways.elsewhere({key: manifests[key].role for key, _ in users})
                self._problem(OBJECT, path, what, of=whose(users, manifests), way=way)
        return damaged

    def _object(self, stored: Stored) -> tuple[Stored, str | None]:
        try:
            found = files.digest(self.objects.path(stored.sha256))
        except FileNotFoundError:
            return stored, "is missing"
        except OSError as error:
            return stored, f"cannot be read: {error.strerror or error}"
        if found == stored:
            return stored, None
        return stored, f"holds {found.size} bytes with digest {found.sha256}"

    def source(self, stored: Stored, users: Iterable[tuple[str, str]]) -> Path | None:
        """A run's file that holds an object's content."""
        for key, name in users:
            path = self.store / "runs" / key / name
            try:
                if path.lstat().st_size == stored.size and files.digest(path) == stored:
                    return path
            except OSError:
                continue
        return None

    def _tree(self, key: str, manifest: Manifest, damaged: set[Stored]) -> Iterator[Problem]:
        run = self.store / "runs" / key
        listed = {file.path: Stored(file.sha256, file.size) for file in manifest.files}
        for name, stored in listed.items():
            what = self._wrong(run / name, stored, damaged)
            if what is None:
                continue
            of = whose([(key, name)], {key: manifest})
            if stored not in damaged:
                way = f"{self.ways.repair()} links it to its object"
            elif self.source(stored, [(key, path) for path in listed]) is not None:
                way = self.ways.repair()
            else:
                way = self.ways.elsewhere({key: manifest.role})
            yield Problem(TREE, run / name, what, of, way)
        for path in sorted(run.rglob("*")):
            name = path.relative_to(run).as_posix()
            if path.is_dir() or name in listed or name == NAME or path.name.startswith(NFS):
                continue
            left = heal.is_temporary(path)
            way = self.ways.repair() if left else self.ways.remove(path)
            yield Problem(EXTRA, path, "is not in the manifest", way=way)

    def _wrong(self, path: Path, stored: Stored, damaged: set[Stored]) -> str | None:
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                return "is no plain file"
            other = self.objects.path(stored.sha256)
            if other.exists() and path.samefile(other):
                return None  # a hard link, whose content was checked as the object's
            content = files.digest(path)
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
        if content == stored:
            return None
        return f"holds {content.size} bytes with digest {content.sha256}"

    def _strays(self) -> None:
        for path in self.objects.strays():
            self._problem(STRAY, path, "is no object", way=self.ways.remove(path))

    def _records(self, manifests: dict[str, Manifest]) -> None:
        """Alignment records, and runs that they name and that are gone."""
        for path in alignments.paths(self.store):
            try:
                record = alignments.load(path)
            except StoreError as error:
                what, way = str(error).rsplit("; ", 1)[0], alignments.way_back(path)
                self._problem(RECORD, path, what, way=way)
                continue
            if not record.is_sealed:
                self.found.unchecked.append(path)
                continue
            if not record.copy.exists():
                self.found.notes.append(f"{path} has no copy; {self.ways.repair()} writes one")
                continue
            try:  # an older one is what a killed process leaves, and does no harm
                alignments.parse(path, record.copy)
            except StoreError as error:
                self._problem(RECORD, record.copy, str(error), way=self.ways.repair())
            for key in record.keys:
                if key not in self.chosen:
                    self.found.notes.append(
                        f"alignment {record.name} names run {key[:12]}, which is not here: not "
                        "made yet, or removed"
                    )
        for key, manifest in manifests.items():
            for parent in manifest.parents:
                if parent not in self.chosen:
                    self.found.notes.append(
                        f"run {key[:12]} ({manifest.role}) replayed {parent[:12]}, which is not "
                        "here"
                    )

    def _assets(self) -> None:
        directory = self.store / "assets"
        for path, what in assets.check(directory):
            way = f"{self.ways.remove(path)}: the next run that needs it makes it again"
            self._problem(ASSET, path, what, way=way)
        self.found.unchecked += assets.unsealed(directory)
