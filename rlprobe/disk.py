"""A full, broken or forbidden disk in one sentence: the path, what happened, what to do.

Such a failure stays an OSError, so that whoever can go on without the file may. The command line
says :func:`sentence` of whatever reaches it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlprobe.errors import RlprobeError

#: How libraries written in Rust tell a failed call; they keep neither its number nor its path.
_RUST = re.compile(r"\(os error (\d+)\)")

_ADVICE = {
    errno.EDQUOT: "your quota there is used up (`quota -s`, `lfs quota`): make room or choose "
    "another place",
    errno.EROFS: "choose another place, or have it mounted for writing",
    errno.EACCES: "choose another place, or have its permissions changed",
    errno.EPERM: "choose another place, or have its permissions changed",
    errno.EIO: "the device failed, or the network to it: ask whoever runs this storage, then try "
    "again",
    errno.ESTALE: "the file server has lost it: have it mounted anew, then try again",
    errno.ETIMEDOUT: "the file server does not answer: ask whoever runs it, then try again",
    errno.ENOENT: "give a path that exists",
    errno.ENOTDIR: "a part of this path is a file; give another",
    errno.EEXIST: "something else has that name; give another path",
    errno.EISDIR: "give the path of a file",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EMFILE: "allow more open files (`ulimit -n 65536`), then try again",
    errno.ENFILE: "the machine has no more open files: end other processes, then try again",
    errno.ENOMEM: "ask for more memory, then try again",
    errno.EFBIG: "this file system or a limit (`ulimit -f`) forbids files of that size: choose "
    "another place",
    errno.EMLINK: "this file system allows no more links to a file: choose another place",
    errno.EXDEV: "these are two file systems: choose a place on one",
}


@contextlib.contextmanager
def writing(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Failures of the disk in this block name ``path`` where they name no file.

    Args:
        path: what is being written.
        temporary: the name that it has until it is whole, which tells nobody anything.

    Raises:
        OSError: with number, reason and file; also where a library raised another error for it.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(temporary):
            raise
        raise _with_path(error, path) from error
    except RlprobeError:
        raise
    except Exception as error:
        number = _number(error)
        if number is None and _exhausted(path):
            # Parquet's writer says "transport error" of a disk without room
            number = errno.ENOSPC
        if number is None:
            raise
        raise _with_path(error, path, number) from error


def _exhausted(path: Path) -> bool:
    room = _room(path)
    return room is not None and room.f_blocks > 0 and room.f_bavail == 0


def _with_path(error: Exception, path: Path, number: int | None = None) -> OSError:
    number = number or _number(error)
    if number is None:
        return OSError(0, str(error), os.fspath(path))
    return OSError(number, os.strerror(number), os.fspath(path))


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _RUST.search(str(error))
    return None if found is None else int(found[1])


def sentence(error: OSError, places: Sequence[str] = ()) -> str:
    """What happened to which file, and what to do.

    Args:
        error: the failure.
        places: where the command writes; they are named when the error names no file.
    """
    number = _number(error)
    named = [str(name) for name in (error.filename, error.filename2) if name is not None]
    where = " to ".join(named) or " or ".join(places) or "a file"
    reason = error.strerror or (os.strerror(number) if number else str(error)) or "it failed"
    if number == errno.ENOSPC:
        return f"{where}: {reason}; {_full(Path([*named, *places, '.'][0]))}"
    advice = _ADVICE.get(number or 0)
    return f"{where}: {reason}" + (f"; {advice}" if advice else "")


def _full(place: Path) -> str:
    """Of a disk without room: bytes, or files (each takes an inode)."""
    room = _room(place)
    if room is not None and room.f_files and not room.f_favail:
        return (
            f"its file system can hold no more than {room.f_files} files: delete some, or choose "
            "another place"
        )
    free = "" if room is None else f"{room.f_bavail * room.f_frsize} bytes are free there: "
    return f"{free}make room (`rlprobe store gc` frees what nothing needs) or choose another place"


def _room(path: Path) -> os.statvfs_result | None:
    for place in (path, *path.parents):
        with contextlib.suppress(OSError, ValueError):
            return os.statvfs(place)
    return None
