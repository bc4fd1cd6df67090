"""Files: there whole or not at all, on the disk, told apart by their content, locked."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rlprobe import disk
from rlprobe.errors import RlprobeError

_THREADS = 16
_BLOCK = 1 << 20
#: Seconds after which a file that is still written is looked at again.
_PAUSE = 0.01


def sha256(stream: BinaryIO) -> bytes:
    """Digest of what is left of a stream, block by block; hashlib.file_digest came with 3.11."""
    state = hashlib.sha256()
    while block := stream.read(_BLOCK):
        state.update(block)
    return state.digest()


class Digest(NamedTuple):
    """A file's content: its sha256 (64 hexadecimal digits) and its size in bytes."""

    sha256: str
    size: int


def digest(path: Path) -> Digest:
    """Read a file and digest it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as handle:
        return Digest(sha256(handle).hex(), handle.tell())


class Followed:
    """Takes the digest of a file beside whoever writes it, in a thread; a context.

    The writer begins with an empty file and only ever appends, and closes it within the context:
    what it wrote last is read as that is left, so that :attr:`digest` is that of the whole file.
    """

    #: Of the whole file; set as the context is left without an error.
    digest: Digest

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._failed: OSError | None = None

    def __enter__(self) -> Followed:
        self._path.touch()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._written.set()
        self._thread.join()
        if kind is None and self._failed is not None:
            raise self._failed

    def _follow(self) -> None:
        state, size = hashlib.sha256(), 0
        try:
            with self._path.open("rb", buffering=0) as file:
                while True:
                    last = self._written.is_set()
                    while block := file.read(_BLOCK):
                        state.update(block)
                        size += len(block)
                    if last:
                        break
                    self._written.wait(_PAUSE)
        except OSError as error:
            self._failed = error
            return
        self.digest = Digest(state.hexdigest(), size)


#: Device, inode, size and times of a file: while they stay, so does what this process read of it.
_Identity = tuple[int, ...]
_seen: dict[_Identity, Future[Digest]] = {}
_seeing = threading.Lock()


def seen_digest(path: Path) -> Digest:
    """:func:`digest`, from memory where this process has read the unchanged file before.

    Where another thread reads it just now, its digest is waited for.

    Raises:
        OSError: it cannot be read.
    """
    found = path.stat()
    identity = (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
    with _seeing:
        known = _seen.get(identity)
        if known is None:
            mine = _seen[identity] = Future[Digest]()
    if known is not None:
        return known.result()
    try:
        mine.set_result(digest(path))
    except BaseException as error:
        with _seeing:
            del _seen[identity]
        mine.set_exception(error)
        raise
    return mine.result()


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


#: What :func:`written` writes to. The "w" tells it from the files of versions that held no lock on
#: them, whose writers cannot be known to be dead.
_UNFINISHED = re.compile(r"\..*\.w\d+-[0-9a-f]{8}\.tmp(\..*)?", re.DOTALL)


def _temporary(path: Path) -> tuple[Path, int]:
    """A new file beside ``path``, and its descriptor, which holds the kernel's lock of it."""
    while True:
        # the ending stays: some writers go by it
        name = f".{path.stem}.w{os.getpid()}-{os.urandom(4).hex()}.tmp{path.suffix}"
        temporary = path.with_name(name)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            # whoever sweeps between the two calls has it for an instant, and removes it
            hold(descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), temporary.stat()):
                    return temporary, descriptor
        except BaseException:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)


def sweep(directory: Path) -> None:
    """Remove what writers that were killed left unfinished in a directory; the living keep theirs.

    A living writer holds the kernel's lock of its file (:func:`hold`), wherever it runs. Where the
    file system has no locks, or a file may not be opened, nothing is known and nothing removed.
    """
    try:
        names = [path.name for path in directory.iterdir() if _UNFINISHED.fullmatch(path.name)]
    except OSError:
        return
    for name in names:
        path = directory / name
        with contextlib.suppress(OSError, InUseError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if hold(descriptor, wait=0.0):
                    path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def written(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A place to write ``path``'s new content to: it replaces ``path`` whole, or not at all.

    The directory is made, and what killed writers left there removed. The place is an empty file
    that this process holds, to be written to and not to be replaced. Whatever is raised in the
    block leaves ``path`` as it was, and nothing beside it. What the disk refuses names ``path``; a
    pipe or device is written to as it is.

    Args:
        path: the file to be.
        durable: flush it to the disk, so that it also survives a power failure; for what cannot be
            made again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        # a pipe or a device, /dev/stdout: a file in its place is what nobody wants
        with disk.writing(path):
            yield path
        return
    sweep(path.parent)
    with disk.writing(path):
        temporary, descriptor = _temporary(path)
    try:
        # inside, so that a disk found full is still full when it is looked at
        with disk.writing(path, temporary):
            yield temporary
            if durable:
                sync(temporary)
            temporary.replace(path)
    finally:
        # gone before its lock is: nobody else takes it for a dead writer's
        temporary.unlink(missing_ok=True)
        os.close(descriptor)
    if durable:
        with disk.writing(path):
            sync(path.parent)


def replace_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Put ``data`` at ``path`` whole or not at all, replacing what is there."""
    with written(path, durable=durable) as temporary:
        temporary.write_bytes(data)


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Put UTF-8 text at ``path`` whole or not at all, replacing what is there."""
    # half of a surrogate pair, which no file can hold, is written as JSON and Python write it
    replace_bytes(path, text.encode("utf-8", "backslashreplace"), durable=durable)


class InUseError(RlprobeError):
    """Somebody else holds a lock."""


#: How a file system says that it has no locks (Lustre without the flock option, some FUSE mounts).
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_POLL = 0.2


def hold(
    descriptor: int,
    *,
    shared: bool = False,
    wait: float | None = None,
    waiting: Callable[[], None] | None = None,
) -> bool:
    """Hold the kernel's lock of an open file until it is closed, or its process dies.

    On NFS (Linux 2.6.12 and later), GPFS and Lustre with ``-o flock`` it holds between hosts.

    Args:
        descriptor: the file; open for writing where the lock is not shared, as NFS wants it.
        shared: with others who share it.
        wait: seconds to wait for it; None for as long as it takes.
        waiting: called once when it is not to be had at once.

    Returns:
        False where the file system has no locks.

    Raises:
        InUseError: somebody else still holds it.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    end = None if wait is None else time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError as error:
            if waiting is not None:
                waiting()
                waiting = None
            if end is not None and time.monotonic() >= end:
                raise InUseError("somebody else holds the lock") from error
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            raise
        time.sleep(_POLL)
