"""Digests of files; making files and directory entries survive a power failure."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

_THREADS = 16
_BLOCK = 1 << 20


def sha256(stream: BinaryIO) -> bytes:
    """Digest of what is left of a stream, block by block; hashlib.file_digest came with 3.11."""
    state = hashlib.sha256()
    while block := stream.read(_BLOCK):
        state.update(block)
    return state.digest()


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """Flush many files or directories: at once, since a file system then does it in one go."""
    with ThreadPoolExecutor(_THREADS) as threads:
        # list() so that an error in a thread is raised here
        list(threads.map(sync, paths))


def sync_tree(root: Path) -> None:
    """Flush the entries of a directory and of all below it."""
    sync_all([Path(directory) for directory, _, _ in os.walk(root)])


def write_new(path: Path, data: bytes) -> None:
    """Write a file that did not exist and flush it."""
    with path.open("xb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def replace_bytes(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` whole or not at all, replacing what is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        write_new(temporary, data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
