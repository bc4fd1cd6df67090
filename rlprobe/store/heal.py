"""An object that was damaged and is whole again, in all runs that have it."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.store import read
from rlprobe.store.manifest import Manifest
from rlprobe.store.objects import Objects, Stored

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.heal")
_log = logging.getLogger("rlprobe.store")


def spread(store: Path, objects: Objects) -> None:
    """Give the runs of a store what :attr:`Objects.healed` brought back.

    Their files are links to what was damaged, and would stay so. Killed half-way, ``store verify``
    finds the others.
    """
    if not objects.healed:
        return
    objects.flush()
    healed = set(objects.healed)
    objects.healed.clear()
    for stored in sorted(healed):
        _log.warning("object %s was damaged in the store, and is whole again", stored.sha256)
    for key, manifest in _manifests(store):
        for file in manifest.files:
            if Stored(file.sha256, file.size) in healed:
                place(store / "runs" / key / file.path, Stored(file.sha256, file.size), objects)


def place(path: Path, stored: Stored, objects: Objects) -> None:
    """Put an object where a run's file is, or should be, in one step."""
    if path.exists() and path.samefile(objects.path(stored.sha256)):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}.heal")
    try:
        objects.link(stored, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def is_temporary(path: Path) -> bool:
    """Whether a killed :func:`place` left this."""
    return _TEMPORARY.fullmatch(path.name) is not None


def is_whole(store: Path, manifest: Manifest) -> bool:
    """Whether all files of a run are there with their sizes."""
    run = store / "runs" / manifest.key
    for file in manifest.files:
        try:
            if (run / file.path).lstat().st_size != file.size:
                return False
        except OSError:
            return False
    return True


def _manifests(store: Path) -> Iterator[tuple[str, Manifest]]:
    for key in read.keys(store):
        with contextlib.suppress(StoreError):  # of a damaged one, verify tells
            yield key, Manifest.load(store / "runs" / key)


def files_of(manifests: Iterable[tuple[str, Manifest]]) -> dict[Stored, list[tuple[str, str]]]:
    """Which runs have an object, and at which paths."""
    found: dict[Stored, list[tuple[str, str]]] = {}
    for key, manifest in manifests:
        for file in manifest.files:
            found.setdefault(Stored(file.sha256, file.size), []).append((key, file.path))
    return found
