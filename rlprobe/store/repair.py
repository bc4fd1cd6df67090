"""``rlprobe store verify --repair``: bring back what verify found, from wherever it still is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlprobe import files
from rlprobe.errors import StoreError
from rlprobe.store import alignments, assets, copies, heal, read
from rlprobe.store.bundlereader import Reader
from rlprobe.store.manifest import NAME, Manifest
from rlprobe.store.objects import Objects, Stored
from rlprobe.store.problems import COPY, EXTRA, GONE, MANIFEST, OBJECT, Problem
from rlprobe.store.publish import Tree
from rlprobe.store.verify import Verified, verify
from rlprobe.store.workspace import workspace


@dataclass
class Repaired:
    """What was mended, and what the store looks like now."""

    #: A sentence each.
    mended: list[str] = field(default_factory=list)
    #: What is still wrong.
    now: Verified = field(default_factory=Verified)


def repair(store: Path, sources: Iterable[Path] = ()) -> Repaired:
    """Mend a store: from its own copies, from files of its runs, from bundles and other stores.

    Nothing is believed but what has the digest that it should have, so a source may be anybody's.
    Files appear whole, in one step each; killed half-way, the next call goes on.

    Args:
        store: the store's directory.
        sources: bundles that ``store export`` wrote, and directories of other stores.

    Raises:
        StoreError: there is no store, or a source is neither.
    """
    before = verify(store)
    with workspace(store) as work:
        _Repair(store, work, before.problems).run(list(sources), result := Repaired())
    _seal(store, before, result)
    result.now = verify(store)
    return result


class _Repair:
    def __init__(self, store: Path, work: Path, problems: list[Problem]) -> None:
        self.store = store
        self.work = work
        self.problems = problems
        self.objects = Objects(store, work)

    def run(self, sources: list[Path], result: Repaired) -> None:
        self.mended = result.mended
        self._records()
        gone = self._manifests()
        self._objects_of_no_run()
        manifests = dict(self._readable())
        lacking = {p.path.parent.name for p in self.problems if p.kind == MANIFEST}
        lacking |= {p.path.name for p in self.problems if p.kind == GONE}
        for source in sources:
            for manifest, data in _manifests_in(source):
                if manifest.key in lacking - manifests.keys() - gone.keys():
                    gone[manifest.key] = manifest, data
        self._contents({**manifests, **{key: m for key, (m, _) in gone.items()}}, sources)
        for manifest, data in gone.values():
            self._whole_run(manifest, data)
        for key, manifest in manifests.items():
            if key not in gone:
                self._tree(key, manifest)

    def _records(self) -> None:
        for path in alignments.paths(self.store):
            states = {}
            for place in (path, alignments.copy_of(path)):
                with contextlib.suppress(StoreError):
                    states[place] = (alignments.parse(path, place), place.read_bytes())
            record, copy = (states.get(p) for p in (path, alignments.copy_of(path)))
            if record is None and copy is not None:
                files.replace_bytes(path, copy[1])
                self.mended.append(f"{path}: taken from its copy")
            elif record is not None and record[0].is_sealed and copy != record:
                files.replace_bytes(alignments.copy_of(path), record[1])
                self.mended.append(f"{alignments.copy_of(path)}: written anew")

    def _manifests(self) -> dict[str, tuple[Manifest, bytes]]:
        """Put manifests and copies back; runs that have to be made whole again are returned."""
        gone: dict[str, tuple[Manifest, bytes]] = {}
        for problem in self.problems:
            if problem.kind == COPY:
                key = problem.path.parent.name
                problem.path.unlink(missing_ok=True)
                copies.write(self.store, key, (self.store / "runs" / key / NAME).read_bytes())
                self.mended.append(f"{problem.path}: written anew")
            elif problem.kind == MANIFEST:
                key = problem.path.parent.name
                for data in copies.intact(self.store, key)[:1]:
                    files.replace_bytes(problem.path, data)
                    self.mended.append(f"{problem.path}: taken from its copy")
            elif problem.kind == GONE:
                key = problem.path.name
                for data in copies.intact(self.store, key)[:1]:
                    gone[key] = Manifest.from_bytes(data, str(problem.path)), data
        return gone

    def _objects_of_no_run(self) -> None:
        for problem in self.problems:
            if problem.kind == OBJECT and not problem.of:
                problem.path.unlink(missing_ok=True)
                self.mended.append(f"{problem.path}: removed, no run has it")
            # what a killed repair left beside the file it was about to replace
            if problem.kind == EXTRA and heal.is_temporary(problem.path):
                problem.path.unlink(missing_ok=True)
                self.mended.append(f"{problem.path}: removed, a killed repair left it")

    def _readable(self) -> Iterator[tuple[str, Manifest]]:
        for key in read.keys(self.store):
            with contextlib.suppress(StoreError):
                yield key, Manifest.load(self.store / "runs" / key)

    def _contents(self, manifests: dict[str, Manifest], sources: list[Path]) -> None:
        """Objects that are damaged or missing, from files of runs, bundles and other stores."""
        uses = heal.files_of(manifests.items())
        wanted = {stored for stored in uses if not self.objects.intact(stored)}
        for stored in sorted(wanted):
            for key, name in uses[stored]:
                path = self.store / "runs" / key / name
                if self._take(path, stored):
                    wanted.discard(stored)
                    break
        for source in sources:
            if not wanted:
                break
            if source.is_dir():
                other = Objects(source)
                for stored in sorted(wanted):
                    if self._take(other.path(stored.sha256), stored):
                        wanted.discard(stored)
            else:
                wanted -= self._from_bundle(source, wanted)
        self.objects.flush()
        heal.spread(self.store, self.objects)

    def _take(self, path: Path, stored: Stored) -> bool:
        try:
            if path.lstat().st_size != stored.size or files.digest(path) != stored:
                return False
        except OSError:
            return False
        self.objects.put_file(path)
        self.mended.append(f"object {stored.sha256}: taken from {path}")
        return True

    def _from_bundle(self, source: Path, wanted: set[Stored]) -> set[Stored]:
        found = set()
        with source.open("rb") as file:
            reader = Reader(file, source)
            index = reader.index()
            for run in index.runs:
                reader.manifest(run)
            for entry in index.objects:
                stored = Stored(entry.sha256, entry.size)
                if stored not in wanted:
                    reader.skip(entry)
                    continue
                reader.store(entry, self.objects)
                found.add(stored)
                self.mended.append(f"object {stored.sha256}: taken from {source}")
        return found

    def _whole_run(self, manifest: Manifest, data: bytes) -> None:
        stored = [Stored(file.sha256, file.size) for file in manifest.files]
        if not all(self.objects.intact(one) for one in stored):
            return  # what is lacking is said by the next verify
        tree = Tree(self.work / f"run-{manifest.key[:16]}", self.objects)
        for file in manifest.files:
            tree.add(file.path, Stored(file.sha256, file.size))
        tree.publish(manifest.key, data, self.store)
        self.mended.append(
            f"run {manifest.key[:12]} ({manifest.role}): put together from its objects"
        )

    def _tree(self, key: str, manifest: Manifest) -> None:
        for file in manifest.files:
            path = self.store / "runs" / key / file.path
            stored = Stored(file.sha256, file.size)
            if not self.objects.intact(stored):
                continue
            try:
                good = path.samefile(self.objects.path(stored.sha256)) and not path.is_symlink()
                good = good or (not path.is_symlink() and files.digest(path) == stored)
            except OSError:
                good = False
            if not good:
                heal.place(path, stored, self.objects)
                self.mended.append(f"{path}: is its object again")


def _seal(store: Path, before: Verified, result: Repaired) -> None:
    """Give what an earlier version made the digests that later ones write.

    Only where nothing is wrong: what is sealed now is taken as right from now on.
    """
    if before.problems:
        return
    there = set(read.keys(store))
    for path in before.unchecked:
        if path.parent.name == "assets":
            assets.seal(path)
        elif path.parent.name == "alignments":
            record = alignments.load(path)
            if not set(record.keys) <= there:
                continue  # one wrong digit would look like a run that is not here
            alignments.record_alignment(store, record.name, record.keys)
        else:
            copies.write(store, path.parent.name, path.read_bytes())
        result.mended.append(f"{path}: sealed, every change of it will show")


def _manifests_in(source: Path) -> Iterator[tuple[Manifest, bytes]]:
    """Manifests of the runs in a bundle or another store.

    Raises:
        StoreError: it is neither.
    """
    if source.is_dir():
        if not (source / "objects").is_dir():
            raise StoreError(f"{source} is neither a bundle nor a store")
        for key in read.keys(source):
            with contextlib.suppress(StoreError):
                yield (
                    Manifest.load(source / "runs" / key),
                    (source / "runs" / key / NAME).read_bytes(),
                )
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise StoreError(f"{source} cannot be read: {error.strerror or error}") from error
    with file:
        reader = Reader(file, source)
        for run in reader.index().runs:
            yield reader.manifest(run)
