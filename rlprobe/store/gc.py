"""Delete what no alignment reaches.

Reached are the runs that recorded alignments name, the runs those were replayed from, and the
objects of all these. Everything else goes: runs (out of sight first), objects, and what killed
processes left. Nothing is deleted while anybody adds to the store.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.store import locks, read, workspace
from rlprobe.store.alignments import alignments
from rlprobe.store.manifest import Manifest
from rlprobe.store.objects import Objects


@dataclass
class Collected:
    """What was, or would be, deleted."""

    runs: list[str] = field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    #: Workspaces that killed processes left.
    leftovers: int = 0
    kept_runs: int = 0


def collect(
    store: Path, *, dry_run: bool = False, everything: bool = False, lock: bool = True
) -> Collected:
    """Delete what no alignment reaches.

    Args:
        store: the store's directory.
        dry_run: only say what would go.
        everything: go on where no alignment was ever recorded, which deletes every run.
        lock: False on a file system without locks, when nobody else uses the store.

    Raises:
        StoreError: the store is in use, or what is reached cannot be told: an alignment record or
            a kept run's manifest is unreadable, or no alignment is recorded at all.
    """
    with locks.exclusive(store) if lock else contextlib.nullcontext():
        have = read.keys(store)
        recorded = alignments(store)
        if have and not recorded and not everything:
            raise StoreError(
                f"{store} records no alignment, so all {len(have)} runs would go; pass --all when "
                "that is what you want"
            )
        kept = _reached(store, have, (key for keys in recorded.values() for key in keys))
        found = Collected(kept_runs=len(kept), leftovers=len(workspace.leftovers(store)))
        if not dry_run:
            workspace.clear(store)
        _collect_runs(store, kept, found, dry_run)
        _collect_objects(store, kept.values(), found, dry_run)
    return found


def _reached(store: Path, have: list[str], roots: Iterable[str]) -> dict[str, Manifest]:
    existing = set(have)
    kept: dict[str, Manifest] = {}
    open_keys = set(roots) & existing
    while open_keys:
        key = open_keys.pop()
        kept[key] = Manifest.load(store / "runs" / key)
        open_keys |= (set(kept[key].parents) & existing) - set(kept)
    return kept


def _collect_runs(store: Path, kept: dict[str, Manifest], found: Collected, dry_run: bool) -> None:
    root = store / "runs"
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name in kept or _awaited(path):
            continue
        found.runs.append(path.name)
        if dry_run:
            continue
        # Out of sight in one step: a run that is being deleted is never seen without a file.
        hidden = store / "tmp" / f"gc-{secrets.token_hex(4)}"
        hidden.parent.mkdir(exist_ok=True)
        path.rename(hidden)
        if hidden.is_dir():
            shutil.rmtree(hidden)
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
