"""A run's browsable tree: built aside of links to objects, then shown by one rename."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlprobe import files
from rlprobe.files import sync, sync_tree, write_new
from rlprobe.store import copies
from rlprobe.store.manifest import NAME
from rlprobe.store.objects import Objects, Stored

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
#: How a file system (NFS, Lustre), or an old kernel, says that it cannot swap two names.
_NO_SWAP = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY}
_SWAP = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE = -100  # AT_FDCWD
_ASIDE = "replaced-"


class Tree:
    """The files of a run to be.

    Args:
        root: a directory in a workspace, which is created.
        objects: where the files' contents are.
    """

    def __init__(self, root: Path, objects: Objects) -> None:
        self.root = root
        self.files: dict[str, Stored] = {}
        self._objects = objects
        root.mkdir()

    def add(self, path: str, stored: Stored) -> None:
        """Put an object at a path relative to the run."""
        destination = self.root / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        self._objects.link(stored, destination)
        self.files[path] = stored

    def publish(self, key: str, manifest: bytes, store: Path) -> Path:
        """Show the run, in place of one with the same key; returns its manifest's path.

        Whenever it is killed, the run that was there is there, or the new one is. Where the file
        system cannot swap two names, the old one may be aside then: see :func:`put_back`.
        """
        write_new(self.root / NAME, manifest)
        self._objects.flush()
        sync_tree(self.root)
        destination = store / "runs" / key
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(store):
            replaces = (destination / NAME).exists()
            if replaces:
                copies.write(store, key, manifest)
                _take_the_place(self.root, destination, store)
            else:
                _show(self.root, destination)
                copies.write(store, key, manifest)
            sync(destination.parent)
            copies.keep_only(store, key, manifest)
        return destination / NAME


def _show(tree: Path, destination: Path) -> None:
    try:
        # An empty directory, which Snakemake makes beforehand, gives way to this.
        tree.rename(destination)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        # what lies there has no manifest: a run that lost it, or something that is none
        destination.rename(tree.with_name(f"without-manifest-{secrets.token_hex(4)}"))
        tree.rename(destination)


def _take_the_place(tree: Path, destination: Path, store: Path) -> None:
    if swap(tree, destination):
        return
    aside = store / "tmp" / f"{_ASIDE}{destination.name}"
    if aside.exists():  # of a replacement that was killed, and done again since
        shutil.rmtree(aside)
    destination.rename(aside)
    tree.rename(destination)
    sync(destination.parent)
    shutil.rmtree(aside, ignore_errors=True)


def put_back(store: Path) -> list[str]:
    """Show runs again that killed replacements took away; the caller is alone in the store.

    Returns:
        Their keys.
    """
    found = []
    for aside in sorted((store / "tmp").glob(f"{_ASIDE}*")):
        key = aside.name.removeprefix(_ASIDE)
        run = store / "runs" / key
        if not (run / NAME).exists() and (aside / NAME).exists():
            with contextlib.suppress(OSError):
                aside.rename(run)
                sync(run.parent)
                found.append(key)
    return found


def is_aside(store: Path, key: str) -> bool:
    """Whether a killed replacement left the run aside."""
    return (store / "tmp" / f"{_ASIDE}{key}" / NAME).exists()


def swap(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the file system cannot.

    Raises:
        OSError: one of them is missing, or may not be renamed.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux, or a C library from before 2018
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _SWAP) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_SWAP:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


@contextlib.contextmanager
def _one_at_a_time(store: Path) -> Iterator[None]:
    """Two publications of one run must not mix up whose copy of the manifest is kept."""
    path = store / "locks" / "publish.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        files.hold(handle.fileno())
        yield
