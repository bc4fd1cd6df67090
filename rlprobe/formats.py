"""Versions of rlprobe's own files: what is read, and what is said of one that is not."""

from __future__ import annotations

import json
from typing import Any

from rlprobe.errors import DumpError, RlprobeError

#: Key of a Parquet file's metadata under which its kind and version stand.
PARQUET = "rlprobe"


def check(
    found: Any, known: tuple[int, ...], where: str, error: type[RlprobeError] = DumpError
) -> int:
    """The version of a file, if this rlprobe reads it.

    Args:
        found: what the file says of itself.
        known: versions that are read, in order.
        where: the file, as the message names it.
        error: what is raised.

    Raises:
        RlprobeError: of type ``error``: the version is newer, or is none.
    """
    if isinstance(found, int) and not isinstance(found, bool):
        if found in known:
            return found
        if found > known[-1]:
            raise error(
                f"{where} was made by a newer rlprobe: its format is {found}, this one reads "
                f"{_listed(known)}; install the rlprobe that made it, or a later one"
            )
    shown = repr(found)[:40]
    raise error(
        f"{where} has format {shown}, which is none; this rlprobe reads {_listed(known)}: it was "
        "changed, damaged or is another file; have it made again"
    )


def mark(kind: str, version: int = 1) -> dict[str, str]:
    """What a Parquet file of a kind carries in its metadata."""
    return {PARQUET: json.dumps({"table": kind, "format": version})}


def check_mark(
    metadata: dict[str, str],
    kind: str,
    known: tuple[int, ...],
    where: str,
    error: type[RlprobeError] = DumpError,
) -> None:
    """Refuse a Parquet file of another kind or version; older ones carry no mark and are read.

    Raises:
        RlprobeError: of type ``error``.
    """
    text = metadata.get(PARQUET)
    if text is None:
        return
    try:
        value = json.loads(text)
        found, version = value["table"], value["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as cause:
        raise error(f"{where}: its metadata is damaged, {text[:80]!r}") from cause
    if found != kind:
        raise error(f"{where} is a table of {str(found)[:40]!r}, expected {kind!r}")
    check(version, known, where, error)


def _listed(known: tuple[int, ...]) -> str:
    return " and ".join(map(str, known))
