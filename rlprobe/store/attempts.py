"""Attempts at a run, in scratch space below the store: ``scratch/{key:16}-{job}``.

One that is committed is gone. One that failed or was killed stays, to be looked at, until the next
attempt at the same run, or until the store is cleaned up.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rlprobe import files
from rlprobe.claims import claimed
from rlprobe.store.manifest import NAME

_ROOT = "scratch"
_LOCKS = "locks"
#: Digits of the key that an attempt's name begins with.
_DIGITS = 16


def named(store: Path, key: str, job: str | int) -> Path:
    """Where a job's attempt at a run is to be."""
    return store / _ROOT / f"{key[:_DIGITS]}-{job}"


def of(store: Path, key: str) -> list[Path]:
    """Every attempt at a run that is there."""
    return sorted((store / _ROOT).glob(f"{key[:_DIGITS]}-*"))


def every(store: Path) -> list[Path]:
    """Attempts at any run: under way, waiting to be committed, or left by what failed or died."""
    return sorted((store / _ROOT).glob(f"{'[0-9a-f]' * _DIGITS}-*"))


def record(attempt: Path) -> Path:
    """Written last by a run that did everything it was asked for."""
    return attempt / "side" / "run.json"


@contextlib.contextmanager
def alone(
    store: Path, key: str, *, wait: float | None = None, waiting: Callable[[], None] | None = None
) -> Iterator[None]:
    """Be the only maker of a run: whoever is clears away what earlier attempts left.

    On a file system without locks a second one is refused at once.

    Args:
        store: the store's directory.
        key: the run's key.
        wait: seconds to wait for another to end; None for as long as it takes.
        waiting: called once when there is another.

    Raises:
        InUseError: another process makes the run.
    """
    path = _lock(store, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        if files.hold(handle.fileno(), wait=wait, waiting=waiting):
            yield
        else:
            with claimed(path.with_suffix(".holder")):
                yield


def clear(store: Path, *, dry_run: bool = False) -> tuple[list[str], int, list[str]]:
    """Remove what failed and killed attempts left.

    What ran to its end and is only to be committed stays, since hours of a device may lie there;
    so does what somebody is at work on, and what nobody can be asked about.

    Returns:
        The names of what went, or would go; its size; the names of what is still to be committed.
    """
    gone, size, waiting = [], 0, []
    for attempt in every(store):
        keys = [path.stem for path in (store / _LOCKS).glob(f"{attempt.name[:_DIGITS]}*.lock")]
        if len(keys) != 1:
            continue
        with contextlib.suppress(files.InUseError), alone(store, keys[0], wait=0.0):
            if record(attempt).exists() and not (store / "runs" / keys[0] / NAME).exists():
                waiting.append(attempt.name)
                continue
            gone.append(attempt.name)
            size += _size(attempt)
            if not dry_run:
                # what cannot be removed (NFS, a file that is still open) goes with the next one
                shutil.rmtree(attempt, ignore_errors=True)
    return gone, size, waiting


def _lock(store: Path, key: str) -> Path:
    return store / _LOCKS / f"{key}.lock"


def _size(attempt: Path) -> int:
    """Bytes on the disk, without what a run in the store has as well."""
    total = 0
    for path in attempt.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total
