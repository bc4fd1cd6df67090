"""What a comparison left in a directory: ``summary.json``, and the tables that it vouches for.

``summary.json`` names every table beside it with its digest, size, rows and version, so that one
that is missing, emptied, cut short, changed or of another comparison is never taken for what was
compared::

    "tables": {"records.parquet": {"format": 1, "sha256": …, "size": …, "rows": …}, …}

Its own ``digest`` is over everything else that it says.
Format 1 named none; of such a summary the records are held against its counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rlprobe import files, formats
from rlprobe.documents import seal, structfile
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.errors import DumpError
from rlprobe.said import Message

FORMAT = 2
FORMATS = (1, FORMAT)
SUMMARY, RECORDS = "summary.json", "records.parquet"
KEY_DATA, TOKEN_SKETCHES = "key_data.parquet", "token_sketches.parquet"
#: Beside the stages of a comparison that was made by hand: what was compared with what.
SIDES = "sides.json"
#: Tables that a comparison may leave, and the versions of each that are read.
TABLES = dict.fromkeys((RECORDS, KEY_DATA, TOKEN_SKETCHES), (1,))
_MAX_BYTES = 256 << 20
_AGAIN = "compare again: remove that directory, then `snakemake align` or `rlprobe compare`"


class Table(msgspec.Struct, frozen=True):
    """A table as the file that vouches for it describes it."""

    sha256: str
    size: int
    rows: int
    format: int = 1


class Sides(msgspec.Struct, frozen=True):
    """``sides.json``: absolute paths of both sides, and the coverage that was asked for."""

    benchmark: str
    target: str
    coverage: float = 0.9
    #: The target's step for steps of the benchmark, as it was asked for.
    map_steps: dict[int, int] = {}
    format: int = 1


def sides(directory: Path) -> Sides | None:
    """What a comparison in this directory was of; None where nothing says so.

    Raises:
        DumpError: the file is damaged or of a newer version.
    """
    path = directory / SIDES
    if not path.is_file():
        return None
    try:
        return structfile.load(path, Sides, most=_MAX_BYTES, unmarked=1, again=_AGAIN)
    except DocumentError as error:
        raise DumpError(f"{path} {error}; {_AGAIN}") from error


class Joined(msgspec.Struct, frozen=True):
    """Key data of one name, joined by sample."""

    #: Rows that both sides have.
    matched: int = 0


class Sketched(msgspec.Struct, frozen=True):
    """Sketches of tokens."""

    #: Step -> tokens that one side has and the other has in no record; comparisons of earlier
    #: versions do not count them.
    alone: dict[str, int] = {}
    #: Micro-batches of either side that do not fit their key data, and are not joined.
    left_out: int = 0


class Samples(msgspec.Struct, frozen=True):
    """What was joined by sample."""

    keys: dict[str, Joined] = {}
    token_sketches: Sketched | None = None


class Of(msgspec.Struct, frozen=True):
    """The run that a side of a comparison is: its key, and sha256 of its manifest as it was."""

    key: str | None = None
    manifest: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """``summary.json`` of one pair and stage, as far as it is read again (docs/compare.md)."""

    #: Status -> records.
    counts: dict[str, int]
    #: Records that were measured.
    compared: int
    #: Side -> share of its records with content that were measured.
    coverage: dict[str, float]
    #: Of those measured: known to be equal bit by bit, and not seen to differ.
    identical: int = 0
    no_difference_seen: int = 0
    steps: list[int] = []
    #: Side -> the first of its records without partner.
    unmatched: dict[str, list[str]] = {}
    max_error: float | None = None
    samples: Samples | None = None
    notes: list[str] = []
    #: How the notes were made (:func:`rlprobe.said.kept`).
    messages: dict[str, Message] = {}
    #: Side -> run; none of dumps, and in comparisons of earlier versions.
    of: dict[str, Of] = {}
    #: Name -> what vouches for it; None in format 1.
    tables: dict[str, Table] | None = None
    format: int = 1

    @property
    def records(self) -> int:
        """Rows of the comparison's table."""
        return sum(self.counts.values())

    @property
    def joined(self) -> frozenset[str]:
        """Names of the key data that both sides have."""
        return frozenset(() if self.samples is None else self.samples.keys)


def describe(
    path: Path, rows: int | None = None, digest: files.Digest | None = None
) -> dict[str, Any]:
    """What vouches for a table that was just written.

    Args:
        path: a Parquet file.
        rows: its rows, where they are known already.
        digest: likewise.
    """
    found = digest or files.seen_digest(path)
    if rows is None:
        rows = int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())
    return {"format": 1, "sha256": found.sha256, "size": found.size, "rows": rows}


def summary(directory: Path) -> Summary | None:
    """``summary.json`` of a comparison; None where there are no results at all.

    Raises:
        DumpError: it is damaged or of a newer version, or tables stand there without it.
    """
    said = document(directory)
    try:
        return None if said is None else msgspec.convert(said, Summary)
    except msgspec.ValidationError as error:
        raise DumpError(f"{directory / SUMMARY} is not a summary: {error}; {_AGAIN}") from error


def document(directory: Path) -> dict[str, Any] | None:
    """:func:`summary` with all that it says, as it was written.

    Raises:
        DumpError: as there.
    """
    path = directory / SUMMARY
    if not path.is_file():
        left = [name for name in TABLES if (directory / name).exists()]
        if left:
            raise DumpError(
                f"{path} is missing, so nothing says what {left[0]} beside it is of; {_AGAIN}"
            )
        return None
    try:
        value = msgspec.json.decode(read_bytes(path, _MAX_BYTES))
    except DocumentError as error:
        raise DumpError(f"{path} {error}; {_AGAIN}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not readable: {error}; {_AGAIN}") from error
    if not isinstance(value, dict):
        raise DumpError(f"{path} is not a summary; {_AGAIN}")
    if formats.check(value.get("format"), FORMATS, str(path)) > 1 and not seal.holds(value):
        raise DumpError(f"{path} is not what was written: it was changed or damaged; {_AGAIN}")
    return value


def of_key_data_alone(said: Summary) -> bool:
    """Whether a stage has no records on either side, and key data that were joined."""
    keys = {} if said.samples is None else said.samples.keys
    return not said.records and any(found.matched for found in keys.values())


def _tables(directory: Path, said: dict[str, Any]) -> dict[str, Table]:
    """What a document vouches for; also that of judged tables, whose other parts are their own."""
    named = said.get("tables") or {}
    try:
        return msgspec.convert(named, dict[str, Table])
    except msgspec.ValidationError as error:
        raise DumpError(f"{directory / SUMMARY}: tables: {error}; {_AGAIN}") from error


def sealed(said: dict[str, Any]) -> str:
    """The text of a summary, with the digest that shows every change of it."""
    return json.dumps(seal.sealed(said), indent=1, allow_nan=False) + "\n"


def table(directory: Path, name: str = RECORDS) -> pl.LazyFrame | None:
    """A table of a comparison, held against what its summary says of it.

    Args:
        directory: of one pair and stage.
        name: one of :data:`TABLES`.

    Returns:
        The whole table, to be read lazily; None where the summary names none, or there are no
        results at all.

    Raises:
        DumpError: the table is missing, empty, cut short, changed, or of a newer version.
    """
    said = summary(directory)
    if said is None:
        return None
    path = directory / name
    if said.format == 1:
        return _counted(path, said)
    wanted = (said.tables or {}).get(name)
    if wanted is None:
        if name == RECORDS:
            raise DumpError(f"{directory / SUMMARY} names no {RECORDS}; {_AGAIN}")
        return None
    return vouched(path, wanted, kind(name), TABLES[name], f"{SUMMARY} beside it", _AGAIN)


def require_there(directory: Path) -> None:
    """Make sure that the tables of a comparison are there, as long as they were written.

    What is in them is held against its digest where they are read (:func:`table`): an answer that
    was drawn from them need not read gigabytes to be told again.

    Raises:
        DumpError: one is missing, or shorter or longer than its summary says.
    """
    said = document(directory)
    for name, wanted in {} if said is None else _tables(directory, said).items():
        if name not in TABLES:
            continue
        path = directory / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DumpError(f"{path} is missing, {SUMMARY} beside it names it; {_AGAIN}") from error
        if size != wanted.size:
            raise DumpError(
                f"{path} has {size} bytes, {SUMMARY} beside it says {wanted.size}: it was "
                f"cut short, emptied or replaced; {_AGAIN}"
            )


def vouched(
    path: Path, wanted: Table, kind: str, known: tuple[int, ...], by: str, again: str
) -> pl.LazyFrame:
    """A table that is exactly what another file says of it.

    Args:
        path: the table.
        wanted: what is said of it.
        kind: what its metadata call it (:func:`rlprobe.formats.mark`).
        known: versions that are read.
        by: who says so, for messages.
        again: how to make it again, for messages.

    Raises:
        DumpError: it is not.
    """
    formats.check(wanted.format, known, str(path))
    try:
        found = files.seen_digest(path)
    except FileNotFoundError as error:
        raise DumpError(
            f"{path} is missing: {by} says that it has {wanted.rows} rows; {again}"
        ) from error
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}; {again}") from error
    if found.size != wanted.size:
        raise DumpError(
            f"{path} has {found.size} bytes, {by} says {wanted.size}: it was cut short, emptied or "
            f"replaced; {again}"
        )
    if found.sha256 != wanted.sha256:
        raise DumpError(
            f"{path} is not what was written (sha256 {found.sha256[:12]}…, {by} says "
            f"{wanted.sha256[:12]}…): it was changed or damaged; {again}"
        )
    try:
        formats.check_mark(pl.read_parquet_metadata(path), kind, known, str(path))
        lazy = pl.scan_parquet(path, glob=False)
        rows = int(lazy.select(pl.len()).collect().item())
    except UNREADABLE as error:
        raise DumpError(f"{path} is not readable: {error}; {again}") from error
    if rows != wanted.rows:
        raise DumpError(f"{path} has {rows} rows, {by} says {wanted.rows}; {again}")
    return lazy


def kind(name: str) -> str:
    """What the metadata of a comparison's table call it."""
    return f"compare/{name.removesuffix('.parquet')}"


def _counted(path: Path, said: Summary) -> pl.LazyFrame | None:
    """A table of format 1: records are as many, as often measured and as far apart as counted."""
    if not path.is_file():
        if path.name == RECORDS:
            raise DumpError(f"{path} is missing, {SUMMARY} beside it sums it up; {_AGAIN}")
        return None
    lazy = pl.scan_parquet(path, glob=False)
    if path.name != RECORDS:
        return lazy
    measured = pl.col("error_kind").is_not_null() | (pl.col("status") == "nonfinite")
    largest = pl.col("error").filter(pl.col("error").is_finite()).max()
    try:
        found = lazy.select(pl.len(), measured.sum(), largest).collect().row(0)
    except UNREADABLE as error:
        raise DumpError(f"{path} is not readable: {error}; {_AGAIN}") from error
    wanted = (said.records, said.compared, said.max_error)
    if found != wanted:
        raise DumpError(
            f"{path} has {found[0]} rows, {found[1]} of them measured, the largest error "
            f"{found[2]}; {SUMMARY} beside it says {wanted[0]}, {wanted[1]} and {wanted[2]}; "
            f"{_AGAIN}"
        )
    return lazy
