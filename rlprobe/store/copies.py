"""A second copy of every manifest: ``{store}/manifests/{key}/{sha256}.json``.

A manifest is what everything else of a run is checked against, and nothing else holds what it
says. The copy is named by its digest, so that either of the two shows whether it is damaged; and it
stands outside the run's directory, so that a run that was removed by hand is missed, and can be put
together again from its objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlprobe.files import replace_bytes, sync

_COPY = re.compile(r"([0-9a-f]{64})\.json")
_KEY = re.compile(r"[0-9a-f]{64}")


def write(store: Path, key: str, manifest: bytes) -> None:
    """Keep a copy of a run's manifest."""
    replace_bytes(_root(store) / key / f"{hashlib.sha256(manifest).hexdigest()}.json", manifest)
    sync(_root(store))


def digests(store: Path, key: str) -> dict[str, Path]:
    """Digests that a run's manifest may have, and where its copies are; empty without a copy."""
    directory = _root(store) / key
    names = directory.iterdir() if directory.is_dir() else []
    return {match[1]: path for path in names if (match := _COPY.fullmatch(path.name))}


def intact(store: Path, key: str) -> list[bytes]:
    """Copies of a run's manifest that are what their names say, the latest first."""
    found = []
    for digest, path in digests(store, key).items():
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == digest:
                found.append((path.stat().st_mtime_ns, data))
    return [data for _, data in sorted(found, reverse=True)]


def keys(store: Path) -> Iterator[str]:
    """Keys of all runs that there is a copy of, whether the run is there or not."""
    root = _root(store)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if _KEY.fullmatch(path.name) and digests(store, path.name):
            yield path.name


def keep_only(store: Path, key: str, manifest: bytes) -> None:
    """Drop the copies of manifests that this one took the place of."""
    kept = hashlib.sha256(manifest).hexdigest()
    for digest, path in digests(store, key).items():
        if digest != kept:
            path.unlink(missing_ok=True)


def drop(store: Path, key: str) -> None:
    """Forget a run that is about to be deleted.

    Raises:
        OSError: a copy cannot be removed; left behind, it would be missed as a run.
    """
    for path in digests(store, key).values():
        path.unlink(missing_ok=True)
    # what NFS keeps for others who have it open goes later
    shutil.rmtree(_root(store) / key, ignore_errors=True)


def _root(store: Path) -> Path:
    return store / "manifests"
