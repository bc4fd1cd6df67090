"""``rlprobe store import``: a bundle's runs into a store."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from rlprobe.dumps import parquet
from rlprobe.errors import StoreError
from rlprobe.files import digest as digest_of
from rlprobe.store import bundle, copies, heal
from rlprobe.store.alignments import record_alignment
from rlprobe.store.bundlereader import Reader
from rlprobe.store.filetypes import check_type
from rlprobe.store.manifest import NAME, Manifest
from rlprobe.store.objects import Objects, Stored
from rlprobe.store.publish import Tree
from rlprobe.store.workspace import workspace


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
        found = digest_of(archive).sha256
        if found != digest.removeprefix("sha256:"):
            raise StoreError(f"{archive} has digest sha256:{found}, not {digest}")
    with archive.open("rb") as file, workspace(store) as work:
        reader = Reader(file, archive)
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
        _check_tables(archive, manifests, objects)
        name = f"imported-{hashlib.sha256(index.to_bytes()).hexdigest()[:16]}"
        # Before the runs appear: no alignment of this store names them yet, and gc must not take
        # them until one does.
        record_alignment(store, name, manifests)
        new = _publish(store, manifests, objects, work)
        heal.spread(store, objects)
    return Imported(list(manifests), new, objects.added, name)


def _publish(
    store: Path, manifests: dict[str, tuple[Manifest, bytes]], objects: Objects, work: Path
) -> int:
    count = 0
    for number, (manifest, data) in enumerate(manifests.values()):
        if _present(store, manifest.key) == data and heal.is_whole(store, manifest):
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


def _check_tables(
    archive: Path, manifests: dict[str, tuple[Manifest, bytes]], objects: Objects
) -> None:
    """Every table can be read: one that cannot might end whatever process tries to."""
    tables = {
        objects.path(file.sha256): file.path
        for manifest, _ in manifests.values()
        for file in manifest.files
        if file.path.endswith(".parquet")
    }
    found = parquet.try_apart(list(tables))
    if found is not None:
        path, why = found
        raise StoreError(
            f"{archive}: {tables[path]} is no table that can be read ({why}); export the run again "
            "where it was made"
        )


def _check_conflicts(
    store: Path, manifests: dict[str, tuple[Manifest, bytes]], replace: bool
) -> None:
    for key, (_, data) in manifests.items():
        present = _present(store, key)
        kept = copies.digests(store, key)
        if present is not None and kept and hashlib.sha256(present).hexdigest() not in kept:
            present = next(iter(copies.intact(store, key)), None)  # damaged: what it was counts
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
