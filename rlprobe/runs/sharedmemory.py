"""What a run's processes leave in /dev/shm, where files live until somebody removes them.

Python's own tracker removes a segment whose owner died. Under Ray it is killed with the worker that
it belongs to, and each run of a vLLM then left its queues there: 400 MB of the machine's memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PLACE = "/dev/shm"
_DELETED = " (deleted)"


@dataclass(frozen=True)
class Segment:
    """A file of shared memory, as the kernel tells it apart from another of that name."""

    path: str
    device: int
    inode: int


def mapped(pids: Iterable[int]) -> set[Segment]:
    """Files in /dev/shm that these processes of this machine have mapped, and that are named still.

    Processes that ended, or are another user's, have none.
    """
    found: set[Segment] = set()
    for pid in pids:
        with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open("rb") as lines:
            for line in lines:
                if f" {PLACE}/".encode() in line:
                    found.update(_segments(line))
    return found


def _segments(line: bytes) -> Iterator[Segment]:
    """Of one line of ``maps``: address, access, offset, device, inode, path (proc(5))."""
    words = line.decode("utf-8", "surrogateescape").rstrip("\n").split(maxsplit=5)
    if len(words) == 6 and not words[5].endswith(_DELETED):
        major, minor = (int(word, 16) for word in words[3].split(":"))
        yield Segment(words[5], os.makedev(major, minor), int(words[4]))


def remove(segments: set[Segment]) -> list[str]:
    """Remove those that no living process has mapped any more; returns their paths.

    What has the same name and is another file, as a container's, is left alone.
    """
    if not segments:
        return []
    used = mapped(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    gone = []
    for segment in sorted(segments - used, key=lambda one: one.path):
        with contextlib.suppress(OSError):
            found = Path(segment.path).lstat()
            if (found.st_dev, found.st_ino) == (segment.device, segment.inode):
                Path(segment.path).unlink()
                gone.append(segment.path)
    return gone
