"""Scratch space inside the store, on the same file system, for what is not yet published."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlprobe.errors import StoreError
from rlprobe.store import locks, publish

_log = logging.getLogger("rlprobe.store")

_ROOT = "tmp"


@contextlib.contextmanager
def workspace(store: Path) -> Iterator[Path]:
    """A directory of one's own under a shared lock; it is gone afterwards."""
    sweep(store)
    with locks.shared(store):
        path = store / _ROOT / secrets.token_hex(8)
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def sweep(store: Path) -> None:
    """Remove what killed processes left, if nobody else uses the store right now."""
    if not leftovers(store):
        return
    try:
        with locks.exclusive(store):
            clear(store)
    except StoreError:
        return  # in use: the leftovers may be somebody's; the next one will see


def leftovers(store: Path) -> list[Path]:
    """Workspaces that exist, whether their owner lives or not."""
    root = store / _ROOT
    return sorted(root.iterdir()) if root.is_dir() else []


def clear(store: Path) -> None:
    """Put back what killed replacements took away, then remove all workspaces.

    The caller holds the exclusive lock. What cannot be removed stays for the next time: NFS keeps
    files that a process elsewhere still has open.
    """
    for key in publish.put_back(store):
        _log.info("run %s is back: what replaced it was killed", key[:12])
    for path in leftovers(store):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
