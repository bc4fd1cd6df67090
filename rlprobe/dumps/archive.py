"""Arrays that capture wrote with ``numpy.savez``: read without pickles and within their size."""

from __future__ import annotations

import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe.dumps import characters
from rlprobe.errors import StoreError

_FILE = re.compile(r"(?P<stage>[a-z_]+)-step(?P<step>\d{1,9})-rank(?P<rank>\d{1,9})\.npz")
#: What numpy raises for an archive that it did not write: its headers are parsed as Python.
_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, EOFError, AttributeError, OverflowError,
    RuntimeError, MemoryError, SyntaxError, tokenize.TokenError,
    zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip


def arrays(path: Path, names: Sequence[str], what: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of these names, each of one dimension at least.

    Args:
        path: an ``.npz`` file.
        names: those that it must have.
        what: what the file is to be, in words, for the error.

    Raises:
        StoreError: it is damaged or lacks one.
    """
    try:
        _check_size(path)
        with np.load(path, allow_pickle=False) as found:
            # what is in the archive and no array comes as bytes
            return {
                name: characters.require(np.atleast_1d(np.asarray(found[name]))) for name in names
            }
    except _DAMAGED as error:
        raise StoreError(f"{path} is not a file of {what}: {error}") from error


def texts(array: np.ndarray[Any, Any], path: Path, what: str) -> list[str]:
    """The texts of an array of one dimension.

    Args:
        array: as :func:`arrays` read it.
        path: the file it is from, for the error.
        what: what the file is to be, likewise.

    Raises:
        StoreError: it holds anything else, or characters that there are not.
    """
    if array.ndim != 1 or array.dtype.kind != "U":
        raise StoreError(f"{path} is not a file of {what}: names are texts in a row")
    try:
        found: list[str] = array.tolist()
        "".join(found).encode()
    except (ValueError, OverflowError) as error:  # half a character, or a number that is none
        raise StoreError(f"{path} is not a file of {what}: {error}") from error
    return found


def parts(directory: Path, stages: Collection[str]) -> Iterator[tuple[str, int, int, Path]]:
    """Stage, step, rank and file of every process that wrote an archive.

    Args:
        directory: holds files ``{stage}-step{N}-rank{R}.npz``; may be missing.
        stages: those that were captured.

    Raises:
        StoreError: a file is called otherwise, or belongs to no captured stage.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        match = _FILE.fullmatch(path.name)
        if match is None:
            if path.name.startswith("."):
                continue
            raise StoreError(f"{path}: expected files named {{stage}}-step{{N}}-rank{{R}}.npz")
        if match["stage"] not in stages:
            raise StoreError(f"{path}: stage {match['stage']} has no records")
        yield match["stage"], int(match["step"]), int(match["rank"]), path


def tables(
    directory: Path, stages: Collection[str], part: Callable[[Path, int, int], pl.DataFrame]
) -> dict[str, pl.DataFrame]:
    """The table of every stage that some process wrote an archive of, by step and rank.

    Args:
        directory, stages: see :func:`parts`.
        part: the rows of one archive, given its path, step and rank.

    Raises:
        StoreError: a file is damaged, is called otherwise, or belongs to no captured stage.
    """
    found: dict[str, list[pl.DataFrame]] = {}
    for stage, step, rank, path in parts(directory, stages):
        found.setdefault(stage, []).append(part(path, step, rank))
    return {
        stage: pl.concat(made).sort("step", "rank", maintain_order=True)
        for stage, made in found.items()
    }


def _check_size(path: Path) -> None:
    """Refuse an archive whose arrays are far larger than it is: ours are not compressed."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which capture never does")
    if size > path.stat().st_size:
        raise ValueError(f"its arrays claim {size} bytes, more than the file has")
