"""Who holds something, and whether that process is known to be dead.

For what the kernel's locks (:func:`rlprobe.files.hold`) cannot do: file systems without them, and
locks that another program leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlprobe.files import InUseError, write_new


class Holder(NamedTuple):
    """A process that holds something, so that others can tell whether it still lives."""

    host: str
    #: Which start of the machine, and which of its process namespaces.
    boot: str
    namespace: str
    pid: int
    #: When the process began, in clock ticks after the machine did: numbers come again.
    began: int

    @classmethod
    def me(cls) -> Holder:
        """This process."""
        return cls(socket.gethostname(), _boot(), _namespace(), os.getpid(), _began(os.getpid()))

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Who wrote ``path``; None where that cannot be told."""
        try:
            value = json.loads(path.read_bytes())
            found = cls(**value)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        kinds = all(isinstance(part, str) for part in found[:3])
        return found if kinds and all(isinstance(part, int) for part in found[3:]) else None

    def to_bytes(self) -> bytes:
        return json.dumps(self._asdict()).encode() + b"\n"

    def is_dead(self) -> bool:
        """Whether it is *known* to be dead: on this host, and no longer there.

        Of another host, or another container of this one, nothing is known.
        """
        if self.host != socket.gethostname() or not self.boot:
            return False
        if self.boot != _boot():
            return True
        return self.namespace == _namespace() and _began(self.pid) != self.began


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold something by the existence of a file: for file systems without the kernel's locks.

    A claim whose process is known to be dead is taken over.

    Raises:
        InUseError: another process holds it, or one of which that cannot be told.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = Holder.me()
    while True:
        try:
            write_new(path, mine.to_bytes())
            break
        except FileExistsError as error:
            other = Holder.read(path)
            if other is None or not other.is_dead():
                who = f"process {other.pid} on {other.host}" if other else "an unknown process"
                raise InUseError(
                    f"{path} is held by {who}; if that is no longer there, remove the file"
                ) from error
            # by a name of one's own: whoever takes it over at the same time must not lose theirs
            aside = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
            with contextlib.suppress(FileNotFoundError):
                path.rename(aside)
            if Holder.read(aside) not in (None, other):
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.link(aside, path)
            aside.unlink(missing_ok=True)
    try:
        yield
    finally:
        if Holder.read(path) == mine:
            path.unlink(missing_ok=True)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _began(pid: int) -> int:
    """Start of a process in clock ticks; -1 where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = text.rpartition(")")[2].split()
    # a zombie holds nothing any more
    return -1 if fields[0] in "ZX" else int(fields[19])
