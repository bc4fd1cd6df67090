"""The directory that a comparison writes: one writer at a time, and nothing of an earlier one.

A comparison of all stages takes the whole directory; with ``--stage`` it takes those stages, so
that a job per stage may write into one directory at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from rlprobe import files
from rlprobe.dumps import results
from rlprobe.store import locks

_LOCKS = ".locks"
#: What a stage's comparison leaves, its summary first: without it nothing beside it counts.
_OF_STAGE = (results.SUMMARY, *results.TABLES, "table.csv", "table.xlsx")
#: What was made of a comparison of dumps, in the same directory.
_OF_ALL = (results.SIDES, "diagnosis.json", "report.html", "judged/*.parquet")


@contextlib.contextmanager
def alone(out: Path, stages: Iterable[str], chosen: bool) -> Iterator[None]:
    """Write these stages into ``out`` alone, earlier results of theirs removed.

    Args:
        stages: canonical names, or directory names of stages of their own.
        chosen: only these were asked for; other stages stay as they are.

    Raises:
        StoreError: another process writes there.
        OSError: the directory cannot be written.
    """
    with contextlib.ExitStack() as held:
        (out / _LOCKS).mkdir(parents=True, exist_ok=True)
        for name in sorted({*stages, *([] if chosen else ["all"])}):
            path = out / _LOCKS / name
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            held.callback(os.close, descriptor)
            locks.claim(descriptor, str(out if name == "all" else out / name))
        _forget(out, set(stages) if chosen else None)
        yield


def say(
    out: Path,
    benchmark: Path,
    target: Path,
    coverage: float,
    map_steps: Mapping[int, int],
) -> None:
    """Note what was compared with what, for the diagnosis and the page."""
    paths = str(benchmark.resolve()), str(target.resolve())
    sides = results.Sides(*paths, coverage, dict(map_steps))
    files.replace_bytes(out / results.SIDES, msgspec.json.encode(sides) + b"\n", durable=False)


def _forget(out: Path, stages: set[str] | None) -> None:
    """Remove what earlier comparisons left of these stages, of all where it is None."""
    earlier = [
        directory
        for directory in out.iterdir()
        if directory.is_dir()
        and not directory.is_symlink()
        and any((directory / name).is_file() for name in (results.SUMMARY, *results.TABLES))
    ]
    if not earlier:
        return  # nothing here is of a comparison: whatever is called so is somebody else's
    for directory in earlier:
        if stages is not None and directory.name not in stages:
            continue
        for name in _OF_STAGE:
            (directory / name).unlink(missing_ok=True)
        # msprobe's tables, and whatever else somebody put there, stay
        with contextlib.suppress(OSError):
            directory.rmdir()
    for pattern in _OF_ALL:
        for path in out.glob(pattern):
            path.unlink()
