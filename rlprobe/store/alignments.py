"""Which runs are kept: those that an alignment names, and those these depend on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from rlprobe.documents import jsonfile
from rlprobe.errors import StoreError
from rlprobe.files import replace_bytes
from rlprobe.store import locks

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")
_KEY = re.compile(r"[0-9a-f]{64}")


def record_alignment(store: Path, name: str, keys: Iterable[str]) -> Path:
    """Say which runs an alignment has, instead of those it had before.

    Call it before the runs are made: a run may then be collected as garbage at no moment. Keys of
    runs that do not exist yet, or never will, do no harm.

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
    value = {"format": FORMAT, "name": name, "keys": wanted}
    with locks.shared(store):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, json.dumps(value, indent=1).encode() + b"\n")
    return path


def alignments(store: Path) -> dict[str, list[str]]:
    """Recorded alignments and their runs' keys.

    Raises:
        StoreError: a record cannot be read: what it keeps is then unknown.
    """
    root = _root(store)
    found = {}
    for path in sorted(root.glob("*.json")) if root.is_dir() else []:
        if path.name.startswith("."):
            continue
        try:
            value = jsonfile.load(path)
            known = value["format"] == FORMAT and all(_KEY.fullmatch(k) for k in value["keys"])
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path} is not a readable alignment record: {error}") from error
        if not known:
            raise StoreError(f"{path} is not of format {FORMAT}, the only one this rlprobe reads")
        found[path.stem] = list(value["keys"])
    return found


def forget_alignment(store: Path, name: str) -> None:
    """Stop keeping an alignment's runs.

    Raises:
        StoreError: no such alignment is recorded.
    """
    have = alignments(store)
    if name not in have:
        raise StoreError(
            f"{store} records no alignment {name!r}; it has {', '.join(sorted(have)) or 'none'}"
        )
    (_root(store) / f"{name}.json").unlink()


def _root(store: Path) -> Path:
    return store / "alignments"
