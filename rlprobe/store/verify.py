"""Is everything in a store what its name says?"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.store import read
from rlprobe.store.manifest import NAME, Manifest
from rlprobe.store.objects import Objects, Stored, digest_file

#: Hashing runs outside Python's lock; more threads than disks feed help nobody.
_THREADS = 4


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    path: Path
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass
class Verified:
    """What was looked at, and what was wrong with it."""

    runs: int = 0
    objects: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)


def verify(store: Path, prefixes: Iterable[str] = ()) -> Verified:
    """Read every byte of some runs, or of all runs and objects, and compare digests.

    Args:
        store: the store's directory.
        prefixes: keys of runs, or their beginnings; empty for the whole store.

    Raises:
        StoreError: there is no store, or no such run.
    """
    if not store.is_dir():
        raise StoreError(f"{store} does not exist; there is no store to verify")
    chosen = [read.resolve(store, prefix) for prefix in prefixes]
    result = Verified()
    manifests: list[tuple[Path, Manifest]] = []
    for key in chosen or read.keys(store):
        path = store / "runs" / key
        try:
            manifests.append((path, read.Run.open(store, key).manifest))
        except StoreError as error:
            result.problems.append(Problem(path / NAME, str(error)))
        result.runs += 1
    wanted = {
        Stored(file.sha256, file.size) for _, manifest in manifests for file in manifest.files
    }
    objects = Objects(store)
    if not chosen:
        wanted |= set(objects)
    with ThreadPoolExecutor(_THREADS) as threads:
        for stored, problem in threads.map(lambda s: _object(objects, s), sorted(wanted)):
            result.objects += 1
            result.bytes += stored.size
            if problem is not None:
                result.problems.append(problem)
    for path, manifest in manifests:
        result.problems += _tree(path, manifest, objects)
    return result


def _object(objects: Objects, stored: Stored) -> tuple[Stored, Problem | None]:
    try:
        path = objects.path(stored.sha256)
    except StoreError as error:
        return stored, Problem(objects.root / stored.sha256[:2] / stored.sha256, str(error))
    try:
        found = digest_file(path)
    except OSError as error:
        return stored, Problem(path, f"cannot be read: {error.strerror or error}")
    if found == stored:
        return stored, None
    return stored, Problem(path, f"holds {found.size} bytes with digest {found.sha256}")


def _tree(run: Path, manifest: Manifest, objects: Objects) -> Iterator[Problem]:
    listed = {file.path: Stored(file.sha256, file.size) for file in manifest.files}
    for name, stored in listed.items():
        path = run / name
        try:
            found = path.lstat()
        except OSError as error:
            yield Problem(path, f"cannot be read: {error.strerror or error}")
            continue
        if not stat.S_ISREG(found.st_mode):
            yield Problem(path, "is no plain file")
        elif not _same_file(path, objects.path(stored.sha256)):
            content = digest_file(path)
            if content != stored:
                yield Problem(path, f"holds {content.size} bytes with digest {content.sha256}")
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if not path.is_dir() and name not in listed and name != NAME:
            yield Problem(path, "is not in the manifest")


def _same_file(path: Path, other: Path) -> bool:
    """A hard link, whose content was checked as the object's."""
    return other.exists() and path.samefile(other)
