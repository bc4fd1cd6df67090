"""Which runs are kept: those that an alignment names, and those these depend on.

A record (``{store}/alignments/{name}.json``) carries a digest of what it says, and has a copy in
``alignments/copies/``: a record with one wrong digit in it would otherwise let a run be deleted.
Records of format 1 have neither, and are believed where all runs that they name are there.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe import formats
from rlprobe.documents import jsonfile
from rlprobe.errors import StoreError
from rlprobe.files import replace_bytes, sync
from rlprobe.store import copies, locks, read
from rlprobe.store.keys import canonical_json

FORMAT = 2
FORMATS = (1, FORMAT)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Record:
    """A recorded alignment."""

    name: str
    path: Path
    keys: list[str]
    format: int = FORMAT

    @property
    def is_sealed(self) -> bool:
        """Whether it carries a digest, so that every change of it shows."""
        return self.format > 1

    @property
    def copy(self) -> Path:
        return copy_of(self.path)


@contextmanager
def keeping(store: Path, name: str, keys: Iterable[str]) -> Iterator[None]:
    """Keep an alignment's runs while some of them are made.

    What the alignment had before stays kept until all of ``keys`` are there: a run that fails takes
    nothing from the results that exist.

    Raises:
        StoreError: as :func:`record_alignment`.
    """
    wanted = sorted(set(keys))
    former = _former(_root(store) / f"{name}.json")
    record_alignment(store, name, [*wanted, *former])
    yield
    # another process may have recorded more meanwhile: what it waits for is no former run
    if set(wanted) <= set(read.keys(store)) and set(_former(_root(store) / f"{name}.json")) == {
        *wanted,
        *former,
    }:
        record_alignment(store, name, wanted)


def _former(path: Path) -> list[str]:
    """Runs that the record names now, or its copy where it is damaged; none where neither can be
    read, as it is written anew."""
    for source in (path, copy_of(path)):
        try:
            return parse(path, source).keys
        except StoreError:
            continue
    return []


def record_alignment(store: Path, name: str, keys: Iterable[str]) -> Path:
    """Say which runs an alignment has, instead of those it had before.

    Runs that are still to be made are kept by :func:`keeping`. Keys of runs that do not exist yet,
    or never will, do no harm.

    Raises:
        StoreError: the name cannot be a file name, or a key is none.
    """
    if not _NAME.fullmatch(name):
        raise StoreError(
            f"alignment name {name!r}: use letters, digits, '.', '_' and '-', at most 200"
        )
    wanted = sorted(set(keys))
    wrong = [key for key in wanted if not _KEY.fullmatch(key)]
    if wrong:
        raise StoreError(f"alignment {name}: {wrong[0]!r} is not a run key")
    path = _root(store) / f"{name}.json"
    said = {"format": FORMAT, "name": name, "keys": wanted}
    data = json.dumps({**said, "digest": _digest(said)}, indent=1).encode() + b"\n"
    with locks.shared(store):
        # Whenever this is killed, the record says what it said before or what it says now. The copy
        # of a new one comes last, as a copy without its record says that the record was lost.
        places = (copy_of(path), path) if path.exists() else (path, copy_of(path))
        for place in places:
            replace_bytes(place, data)
    return path


def alignments(store: Path) -> dict[str, list[str]]:
    """Recorded alignments and their runs' keys.

    Raises:
        StoreError: a record cannot be read: what it keeps is then unknown.
    """
    return {path.stem: load(path).keys for path in paths(store)}


def paths(store: Path) -> list[Path]:
    """Records that are there, or should be as their copies are."""
    root = _root(store)
    found = {path.name for directory in (root, root / "copies") for path in _files(directory)}
    return [root / name for name in sorted(found)]


def load(path: Path) -> Record:
    """One record.

    Raises:
        StoreError: it is missing, unreadable, changed or of a newer version.
    """
    try:
        return parse(path, path)
    except StoreError as error:
        raise StoreError(f"{error}; {way_back(path)}") from error


def parse(path: Path, source: Path) -> Record:
    """The record that belongs at ``path``, read from there or from its copy.

    Raises:
        StoreError: as :func:`load`, without what to do.
    """
    if not source.exists():
        raise StoreError(f"the alignment record {source} is missing")
    try:
        value = jsonfile.load(source)
        version = formats.check(value["format"], FORMATS, str(source), StoreError)
        keys = list(value["keys"])
        good = all(_KEY.fullmatch(key) for key in keys)
        if version > 1:
            good &= value["digest"] == _digest({k: v for k, v in value.items() if k != "digest"})
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{source} is not a readable alignment record: {error}") from error
    if not good or value.get("name", path.stem) != path.stem:
        raise StoreError(f"{source} is not the alignment record that was written: it is damaged")
    return Record(path.stem, path, keys, version)


def kept(store: Path) -> set[str]:
    """Keys of the runs that recorded alignments name, for deleting the others.

    Raises:
        StoreError: a record cannot be checked, so that nobody knows what it keeps.
    """
    found: set[str] = set()
    there = {*read.keys(store), *copies.keys(store)}
    for path in paths(store):
        record = load(path)
        gone = [key for key in record.keys if key not in there]
        if gone and not record.is_sealed:
            raise StoreError(
                f"{path} is of format 1, which nothing shows a change of, and names run "
                f"{gone[0][:12]}, which is not here: one wrong digit would look so. `rlprobe run` "
                "of that alignment writes the record anew; "
                f"`rlprobe store gc --store {shlex.quote(str(store))} --forget "
                f"{shlex.quote(record.name)}` drops it"
            )
        found.update(record.keys)
    return found


def forget_alignment(store: Path, name: str) -> None:
    """Stop keeping an alignment's runs, whatever state its record is in.

    Raises:
        StoreError: no such alignment is recorded.
    """
    have = paths(store)
    path = _root(store) / f"{name}.json"
    if path not in have:
        names = ", ".join(path.stem for path in have)
        raise StoreError(f"{store} records no alignment {name!r}; it has {names or 'none'}")
    # the copy last: killed in between, the record is missed and not forgotten by halves
    path.unlink(missing_ok=True)
    copy_of(path).unlink(missing_ok=True)
    sync(path.parent)


def copy_of(path: Path) -> Path:
    """Where a record's copy stands."""
    return path.parent / "copies" / path.name


def way_back(path: Path) -> str:
    """How a record that cannot be read is mended, as a command."""
    store = shlex.quote(str(path.parent.parent))
    try:
        parse(path, copy_of(path))
    except StoreError:
        return (
            f"`rlprobe run --config CONFIG --role benchmark --store {store}` with the alignment's "
            f"file writes it anew; or `rlprobe store gc --store {store} --forget "
            f"{shlex.quote(path.stem)}` "
            "drops it, and then deletes what no other one names"
        )
    return f"`rlprobe store verify --repair --store {store}` takes it from its copy"


def _digest(said: dict[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(canonical_json(said)).hexdigest()


def _files(directory: Path) -> list[Path]:
    found = directory.glob("*.json") if directory.is_dir() else []
    return [path for path in found if not path.name.startswith(".")]


def _root(store: Path) -> Path:
    return store / "alignments"
