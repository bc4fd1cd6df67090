"""The directory that a comparison writes: one writer at a time, and nothing of an earlier one.

A comparison of all stages takes the whole directory; with ``--stage`` it takes those stages, so
that a job per stage may write into one directory at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rlprobe import files
from rlprobe.documents import structfile
from rlprobe.dumps import results
from rlprobe.errors import RlprobeError, StoreError, UsageError
from rlprobe.store import locks

_log = logging.getLogger(__name__)
_LOCKS = ".locks"
#: What a stage's comparison leaves, its summary first: without it nothing beside it counts.
_OF_STAGE = (results.SUMMARY, *results.TABLES, "table.csv", "table.xlsx")
#: What was made of a comparison of dumps, in the same directory.
_OF_ALL = (
    "diagnosis.json",
    "refine/diagnosis.json",
    "report.html",
    "report.md",
    "report.json",
    "records.csv",
    "history/[0-9]*T*Z-*.html",
    "judged/*.parquet",
    results.SIDES,
)


def require_apart(out: Path, inputs: Iterable[Path]) -> None:
    """Make sure that no result is written into what is compared, nor the other way round.

    Raises:
        UsageError: ``out`` is an input, lies in one, or holds one; or it is no directory, or lies
            in what is none.
    """
    for part in (out, *out.parents):
        if part.exists() and not part.is_dir():
            raise UsageError(f"-o {out}: {part} is a file; give a directory, which is made")
    there = out.resolve()
    for path in inputs:
        given = path.resolve()
        if there == given or given in there.parents:
            raise UsageError(f"-o {out} is, or lies in, what is compared ({path}); choose another")
        if there in given.parents:
            raise UsageError(
                f"-o {out} holds what is compared ({path}); choose a directory of its own, "
                f"such as {out / 'compared'}"
            )


@contextlib.contextmanager
def answerable(out: Path, chosen: Iterable[str]) -> Iterator[None]:
    """Find out what is to be compared; a failure leaves no earlier answer in ``out`` either.

    Args:
        out: the directory of the results; it is not made.
        chosen: canonical names of the only stages asked for; empty for all.
    """
    try:
        yield
    except RlprobeError:
        stages = set(chosen)
        if _earlier(out):
            locked = {path.name for path in (out / _LOCKS).glob("*")} - {"all"}
            # whoever writes there now has removed it already
            with contextlib.suppress(StoreError), alone(out, stages or locked, bool(stages)):
                _log.warning(
                    "note: the earlier results in %s are gone: none are left of sides that "
                    "could not be compared",
                    out,
                )
        raise


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
        # also in directories of stages that nobody may ever write again
        for path in (out, *out.iterdir()):
            if path.is_dir() and not path.is_symlink():
                files.sweep(path)
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
    files.replace_bytes(out / results.SIDES, structfile.encoded(sides), durable=False)


def _forget(out: Path, stages: set[str] | None) -> None:
    """Remove what earlier comparisons left of these stages, of all where it is None."""
    earlier = _earlier(out)
    if not earlier:
        return  # nothing here is of a comparison: whatever is called so is somebody else's
    # what speaks for all of it goes first: killed in between, no verdict is of what is gone
    for pattern in _OF_ALL:
        for path in out.glob(pattern):
            path.unlink()
    for directory in earlier:
        if stages is not None and directory.name not in stages:
            continue
        for name in _OF_STAGE:
            (directory / name).unlink(missing_ok=True)
        # msprobe's tables, and whatever else somebody put there, stay
        with contextlib.suppress(OSError):
            directory.rmdir()


def _earlier(out: Path) -> list[Path]:
    """Directories of stages that a comparison left."""
    if not out.is_dir():
        return []
    return [
        directory
        for directory in out.iterdir()
        if directory.is_dir()
        and not directory.is_symlink()
        and any((directory / name).is_file() for name in (results.SUMMARY, *results.TABLES))
    ]
