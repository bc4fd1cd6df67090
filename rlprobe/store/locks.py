"""Who may use a store at the same time.

Whoever adds to a store, or reads all of a run, holds a shared lock; whoever deletes holds the
exclusive one. The kernel releases both when a process dies, so a killed commit blocks nobody.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from pathlib import Path

from rlprobe import files
from rlprobe.errors import StoreError

_log = logging.getLogger("rlprobe.store")

_FILE = "locks/store.lock"
#: How a file system says that one may not write.
_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextlib.contextmanager
def shared(store: Path) -> Iterator[None]:
    """Keep what is in the store from being deleted; waits while something is.

    A file system without locks is used all the same: there ``store gc`` refuses instead. So is a
    store of somebody else's that may only be read and has no lock file yet.
    """
    with _opened(store, reading=True) as descriptor:
        if descriptor is not None and not files.hold(descriptor, shared=True):
            _log.debug("%s: no file locks on this file system", store)
        yield


@contextlib.contextmanager
def exclusive(store: Path, wait: float | None = 0.0) -> Iterator[None]:
    """Be alone in the store.

    Args:
        store: the store's directory.
        wait: seconds to wait for others to end; None for as long as it takes.

    Raises:
        StoreError: somebody else uses it, or its file system has no locks.
    """

    def waiting() -> None:
        if wait != 0:
            _log.info("waiting: %s is in use", store)

    if not store.is_dir():
        raise StoreError(f"{store} is not a directory: there is no store")
    with _opened(store, reading=False) as descriptor:
        assert descriptor is not None
        try:
            held = files.hold(descriptor, wait=wait, waiting=waiting)
        except files.InUseError as error:
            raise StoreError(
                f"{store} is in use: a commit, import or export is under way; try again when it "
                "has ended, or pass --wait"
            ) from error
        if not held:
            raise StoreError(
                f"{store}: its file system has no file locks, so nobody can tell whether a commit "
                "is under way; when you know that none is, pass --no-lock"
            )
        yield


def claim(descriptor: int, what: str) -> None:
    """Be the only writer of an open file, until it is closed.

    Raises:
        StoreError: another process writes it.
    """
    try:
        files.hold(descriptor, wait=0.0)
    except files.InUseError as error:
        raise StoreError(f"{what} is being written by another process") from error


@contextlib.contextmanager
def _opened(store: Path, *, reading: bool) -> Iterator[int | None]:
    path = store / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # "a": NFS grants an exclusive lock only on a file that is open for writing.
        handle = path.open("a")
    except OSError as error:
        if not reading or error.errno not in _READ_ONLY:
            raise
        if not path.is_file():
            yield None
            return
        handle = path.open()
    with handle:
        yield handle.fileno()
