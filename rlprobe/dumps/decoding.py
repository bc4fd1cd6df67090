"""One process's dump files as a record table, decoded here or beside this process."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl

from rlprobe.dumps import dumpjson, records


def table(path: Path, step: int, rank: int) -> pl.DataFrame:
    """The record table of a rank directory, or of a single dump.json or debug.json.

    Raises:
        DumpError: there is none, or it is not in the format.
    """
    if path.is_file():
        return records.finish(dumpjson.read(path), step, rank)
    return records.build_rank(records.RankDirectory(step, rank, path), stacks=False)


class Memory:
    """A table on its way between two processes: an unnamed file in memory, mapped and not copied.

    The process that made it holds it; the other opens it by :attr:`path` while it is held.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("rlprobe-table"), "rb")
        #: Where the other process finds it.
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def table(self) -> pl.DataFrame:
        """What was put there; the file goes once nothing of it is used any more."""
        found = pl.read_ipc(self.path)
        self._file.close()
        return found


def put(path: Path, step: int, rank: int, memory: str) -> None:
    """:func:`table` of a dump, into another process's :class:`Memory`.

    Raises:
        DumpError: as :func:`table`.
        OSError: the other process's file cannot be opened.
    """
    # as it is: compressing it takes longer than handing it over
    table(path, step, rank).write_ipc(memory, compression="uncompressed")
