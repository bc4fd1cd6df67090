"""Delete what no alignment reaches.

Reached are the runs that recorded alignments name, the runs those were replayed from, and the
objects of all these. Everything else goes: runs (out of sight first), objects, and what killed
processes and failed attempts left. Nothing is deleted while anybody adds to the store.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.store import alignments, attempts, copies, locks, read, workspace
from rlprobe.store.manifest import NAME, Manifest
from rlprobe.store.objects import NFS, Objects, Stored
from rlprobe.terminal import counted


@dataclass
class Collected:
    """What was, or would be, deleted."""

    runs: list[str] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    #: Workspaces that killed processes left.
    leftovers: int = 0
    kept_runs: int = 0
    #: What failed and killed attempts at runs left, by name.
    attempts: list[str] = field(default_factory=list)
    attempts_bytes: int = 0
    #: Attempts that ran to their end, were not committed, and stay.
    uncommitted: list[str] = field(default_factory=list)


def collect(
    store: Path,
    *,
    dry_run: bool = False,
    everything: bool = False,
    lock: bool = True,
    wait: float | None = 0.0,
) -> Collected:
    """Delete what no alignment reaches.

    Args:
        store: the store's directory.
        dry_run: only say what would go.
        everything: go on where no alignment was ever recorded, which deletes every run.
        lock: False on a file system without locks, when nobody else uses the store.
        wait: seconds to wait for others to end; None for as long as it takes.

    Raises:
        StoreError: the store is in use, or what is reached cannot be told: an alignment record or
            a kept run's manifest cannot be checked, or no alignment is recorded at all.
    """
    with locks.exclusive(store, wait) if lock else contextlib.nullcontext():
        left = len(workspace.leftovers(store))
        if not dry_run:
            workspace.clear(store)
        have = read.keys(store)
        named = alignments.kept(store)
        if have and not alignments.paths(store) and not everything:
            raise StoreError(
                f"{store} records no alignment, so all of it ({counted(len(have), 'run')}) would "
                "go; pass --all when that is what you want"
            )
        reached = _reached(store, named)
        found = Collected(kept_runs=len(reached), leftovers=left)
        _collect_runs(store, reached, found, dry_run)
        _collect_objects(store, reached.values(), found, dry_run)
        found.attempts, found.attempts_bytes, found.uncommitted = attempts.clear(
            store, dry_run=dry_run
        )
    return found


def remove(store: Path, prefix: str, *, force: bool = False) -> Collected:
    """Delete one run, whatever state it is in, and the objects that no other run has.

    Args:
        store: the store's directory.
        prefix: the run's key, or the beginning of it.
        force: also where other runs of the store were replayed from it.

    Raises:
        StoreError: there is no such run, the store is in use, or others were replayed from it.
    """
    with locks.exclusive(store):
        key = read.resolve(store, prefix, complete=False)
        others, unreadable = _others(store, key)
        children = [other for other, manifest in others.items() if key in manifest.parents]
        if children and not force:
            raise StoreError(
                f"run {key[:12]} is what {', '.join(child[:12] for child in children)} replayed: "
                "without it they cannot be judged; pass --force to delete it all the same"
            )
        found = Collected(runs=[key], kept_runs=len(others))
        _delete(store, key)
        # what a manifest that cannot be read refers to is unknown: then no object goes
        if not unreadable:
            _collect_objects(store, others.values(), found, dry_run=False)
    return found


def _others(store: Path, key: str) -> tuple[dict[str, Manifest], list[str]]:
    """Manifests of the other runs, and keys of those that cannot be read."""
    found: dict[str, Manifest] = {}
    unreadable = []
    for other in sorted({*read.keys(store, complete=False), *copies.keys(store)} - {key}):
        try:
            found[other] = _checked(store, other)
        except StoreError:
            unreadable.append(other)
    return found, unreadable


def _reached(store: Path, roots: Iterable[str]) -> dict[str, Manifest]:
    existing = {*read.keys(store), *copies.keys(store)}
    kept: dict[str, Manifest] = {}
    open_keys = set(roots) & existing
    while open_keys:
        key = open_keys.pop()
        kept[key] = _checked(store, key)
        parents = {*kept[key].parents, str(kept[key].declared.get("replay_of"))}
        open_keys |= (parents & existing) - set(kept)
    return kept


def _checked(store: Path, key: str) -> Manifest:
    """A run's manifest, of which nothing that it refers to may be taken for garbage.

    A run that was removed by hand, and could be put together again, counts by its copy.

    Raises:
        StoreError: it is damaged; or nothing shows that it is not, and objects that it names are
            missing, as one wrong digit in it would look.
    """
    run = store / "runs" / key
    where = run / NAME
    if not where.exists():
        for data in copies.intact(store, key):
            return Manifest.from_bytes(data, str(where))
    manifest = Manifest.load(run)
    if manifest.key != key:
        raise StoreError(f"{where} is the manifest of another run, {manifest.key}")
    if not copies.digests(store, key):
        objects = Objects(store)
        for file in manifest.files:
            if not objects.has(Stored(file.sha256, file.size)):
                own = shlex.quote(str(store))
                raise StoreError(
                    f"{where} has no copy that it could be held against, and its object "
                    f"{file.sha256} ({file.path}) is missing: nothing is deleted until "
                    f"`rlprobe store verify --repair --store {own}` finds it, or "
                    f"`rlprobe store rm --store {own} {key[:12]}` drops the run"
                )
    return manifest


def _collect_runs(store: Path, kept: dict[str, Manifest], found: Collected, dry_run: bool) -> None:
    root = store / "runs"
    gone = {path.name for path in root.iterdir() if not _awaited(path)} if root.is_dir() else set()
    for name in sorted({*gone, *copies.keys(store)} - set(kept)):
        if name.startswith(NFS):
            continue
        if name in gone:
            found.runs.append(name)
        if not dry_run:
            _delete(store, name)


def _delete(store: Path, name: str) -> None:
    # its copy first: a run without one is still a run, a copy without a run is missed
    copies.drop(store, name)
    path = store / "runs" / name
    if not path.exists() and not path.is_symlink():
        return
    # Out of sight in one step: a run that is being deleted is never seen without a file.
    hidden = store / "tmp" / f"gc-{secrets.token_hex(4)}"
    hidden.parent.mkdir(exist_ok=True)
    path.rename(hidden)
    if hidden.is_dir() and not hidden.is_symlink():
        # what cannot be deleted yet (NFS, a file that is still open) goes with the next clean-up
        shutil.rmtree(hidden, ignore_errors=True)
    else:
        hidden.unlink()


def _awaited(path: Path) -> bool:
    """An empty directory: Snakemake makes one before the run starts."""
    return path.is_dir() and not any(path.iterdir())


def _collect_objects(
    store: Path, kept: Iterable[Manifest], found: Collected, dry_run: bool
) -> None:
    reached = {file.sha256 for manifest in kept for file in manifest.files}
    objects = Objects(store)
    for stored in objects:
        if stored.sha256 in reached:
            continue
        found.objects += 1
        found.bytes += stored.size
        if not dry_run:
            objects.path(stored.sha256).unlink()
