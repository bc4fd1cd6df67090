"""Is a run's file the one that its manifest lists? Asked by whatever reads one.

Apart from :mod:`rlprobe.store.manifest`, whose models load slowly: comparisons ask this as well.
"""

from __future__ import annotations

import re
import shlex
from functools import lru_cache
from pathlib import Path

from rlprobe import files
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import StoreError
from rlprobe.files import Digest

MANIFEST = "manifest.json"
_MAX_BYTES = 512 << 20
#: Where a store has its runs, by their keys.
_RUNS, _KEY = "runs", re.compile(r"[0-9a-f]{64}")


def listed(run: Path) -> dict[str, Digest]:
    """Files of a run by their paths in it.

    Raises:
        StoreError: the manifest is missing or damaged.
    """
    return _read(run)[1]


def key(run: Path) -> str:
    """The run's key, as its manifest says it.

    Raises:
        StoreError: as :func:`listed`.
    """
    return _read(run)[0]


def _read(run: Path) -> tuple[str, dict[str, Digest]]:
    path = run / MANIFEST
    try:
        state = path.stat()
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror or error}; {_mend(run)}"
        ) from error
    return _manifest(path, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=8)
def _manifest(path: Path, *_identity: int) -> tuple[str, dict[str, Digest]]:
    try:
        said = jsonfile.load(path, most=_MAX_BYTES)
        rows = {row["path"]: Digest(row["sha256"], row["size"]) for row in said["files"]}
        return str(said.get("key", "")), rows
    except (DocumentError, ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path} lists no files: {error}; {_mend(path.parent)}") from error


def require_manifest(run: Path) -> None:
    """Refuse a run of a store whose manifest is gone: nothing says what was captured in it.

    Raises:
        StoreError: it is.
    """
    inside = run.absolute()
    of_a_store = inside.parent.name == _RUNS and _KEY.fullmatch(inside.name)
    if of_a_store and not (run / MANIFEST).is_file():
        raise StoreError(f"{run / MANIFEST} is missing, and says what the run holds; {_mend(run)}")


def checked(run: Path, name: str, wanted: Digest | None = None) -> Path:
    """A file of a run, which is what the manifest says.

    Args:
        run: the run's directory.
        name: the file's path in it.
        wanted: what the manifest lists, where that is known already.

    Raises:
        StoreError: it is not listed, missing, or has another content.
    """
    path = run / name
    wanted = wanted or listed(run).get(name)
    if wanted is None:
        raise StoreError(f"{path} is not in the manifest of its run: nothing says what it is")
    try:
        content = files.seen_digest(path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror or error}), its manifest lists it; "
            f"{_mend(run)}"
        ) from error
    if content != wanted:
        raise StoreError(
            f"{path} is not what was committed: {content.size} bytes with digest "
            f"{content.sha256[:12]}…, the manifest says {wanted.size} with {wanted.sha256[:12]}…; "
            f"{_mend(run)}"
        )
    return path


def found(run: Path, name: str) -> Path | None:
    """A file of a run if it has it; of a directory without a manifest, what lies there.

    Raises:
        StoreError: the manifest lists it, and it is missing or has another content.
    """
    if not (run / MANIFEST).is_file():
        return run / name if (run / name).is_file() else None
    return checked(run, name) if name in listed(run) else None


def checked_below(run: Path, name: str) -> Path | None:
    """A directory of a run with all of its files; None where the manifest lists none in it.

    Raises:
        StoreError: a file is missing or has another content, or one is there that is not listed.
    """
    inside = {n: d for n, d in listed(run).items() if n.startswith(f"{name}/")}
    for below, wanted in inside.items():
        checked(run, below, wanted)
    directory = run / name
    for path in directory.rglob("*") if directory.is_dir() else []:
        if path.relative_to(run).as_posix() not in inside and not path.is_dir():
            raise StoreError(f"{path} is not in the manifest of its run; {_mend(run)}")
    return directory if inside else None


def _mend(run: Path) -> str:
    store = shlex.quote(str(run.parent.parent))
    return f"`rlprobe store verify --store {store}` says how to mend it"
