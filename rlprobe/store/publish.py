"""A run's browsable tree: built aside of links to objects, then shown by one rename."""

from __future__ import annotations

import contextlib
import errno
import secrets
from pathlib import Path

from rlprobe.files import sync, sync_tree, write_new
from rlprobe.store.manifest import NAME
from rlprobe.store.objects import Objects, Stored

_TAKEN = {errno.ENOTEMPTY, errno.EEXIST}
#: More replacements of one run at the same moment than anybody makes.
_ATTEMPTS = 16


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

        A run already there is taken away first: between the two renames there is none.
        """
        write_new(self.root / NAME, manifest)
        self._objects.flush()
        sync_tree(self.root)
        destination = store / "runs" / key
        destination.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(_ATTEMPTS):
            try:
                # An empty directory, which Snakemake makes beforehand, gives way to this.
                self.root.rename(destination)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            with contextlib.suppress(FileNotFoundError):  # another commit of it was faster
                destination.rename(self.root.with_name(f"replaced-{secrets.token_hex(4)}"))
        else:
            raise AssertionError(f"{destination} is replaced by others all the time")
        sync(destination.parent)
        return destination / NAME
