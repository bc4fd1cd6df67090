"""Parquet files whose columns are partly another file's, copied as they are encoded there.

Encoding is most of what writing a table costs; what stands in another file already, row group for
row group, need not be encoded again. Only footers are read and written here: what a column holds
is its writer's and its reader's.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import polars as pl

from rlprobe.documents import thrift
from rlprobe.documents.thrift import BINARY, I16, I32, I64, LIST, STRUCT, Struct

_MAGIC = b"PAR1"
#: Bytes at the end of a file: the length of its footer, and the magic.
_TAIL = 8
#: Bytes that are copied at a time: small enough that memory is used again.
_BLOCK = 1 << 16

# Fields of the structs of a footer (parquet.thrift).
_SCHEMA, _ROWS, _GROUPS = 2, 3, 4
_G_COLUMNS, _G_BYTES, _G_ROWS, _G_START, _G_COMPRESSED, _G_NUMBER = 1, 2, 3, 5, 6, 7
_C_START, _C_META = 2, 3
_M_PATH, _M_UNCOMPRESSED, _M_COMPRESSED, _M_DATA, _M_DICTIONARY = 3, 6, 7, 9, 11
#: What a chunk says of itself: type, encodings, path, codec, numbers of values and bytes, places.
#: The rest may be left out: statistics, sizes, places of indices and of Bloom filters.
_M_KEPT = (1, 2, _M_PATH, 4, 5, _M_UNCOMPRESSED, _M_COMPRESSED, _M_DATA, _M_DICTIONARY)
#: Those that its bytes are read by: type, encodings, codec, numbers of values and bytes.
_M_READ = (1, 2, 4, 5, _M_UNCOMPRESSED, _M_COMPRESSED)
_E_NAME, _E_CHILDREN = 4, 5


class Chunk(NamedTuple):
    """One column of one row group: what its file says of it, and where it lies."""

    meta: Struct
    start: int
    length: int


class Group(NamedTuple):
    """A row group: its rows, and its columns that are of one chunk each."""

    rows: int
    chunks: dict[str, Chunk]


@dataclass(frozen=True)
class Layout:
    """What a footer says."""

    #: Top-level column -> its elements of the schema, its own name left out.
    columns: dict[str, list[Struct]]
    groups: list[Group]
    footer: Struct


def layout(file: BinaryIO) -> Layout:
    """The layout of a Parquet file.

    Raises:
        ValueError: it is none.
        OSError: it cannot be read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    tail = file.read(_TAIL)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - _TAIL:
        raise ValueError("no Parquet file")
    file.seek(size - _TAIL - length)
    footer = thrift.decoded(file.read(length))
    try:
        columns = _columns(footer[_SCHEMA][1][1])
        leaves = [name for name, own in columns.items() for e in own if _E_CHILDREN not in e]
        groups = [_group(group, leaves, size) for group in footer[_GROUPS][1][1]]
        return Layout(columns, groups, footer)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("no footer of a Parquet file") from error


def _columns(elements: Sequence[Struct]) -> dict[str, list[Struct]]:
    found, at = {}, 1
    while at < len(elements):
        end, waiting = at, 1
        while waiting:
            waiting += elements[end].get(_E_CHILDREN, (I32, 0))[1] - 1
            end += 1
        own = {key: field for key, field in elements[at].items() if key != _E_NAME}
        found[elements[at][_E_NAME][1].decode()] = [own, *elements[at + 1 : end]]
        at = end
    return found


def _group(group: Struct, leaves: Sequence[str], size: int) -> Group:
    chunks: dict[str, Chunk] = {}
    several = set()
    columns: list[Struct] = group[_G_COLUMNS][1][1]
    for name, column in zip(leaves, columns, strict=True):
        meta: Struct = column[_C_META][1]
        if meta[_M_PATH][1][1][0] != name.encode():
            # readers go by the order or by the names
            raise ValueError("columns stand in another order than the schema has them")
        start = meta.get(_M_DICTIONARY, meta[_M_DATA])[1]
        length = meta[_M_COMPRESSED][1]
        if not (0 < start <= meta[_M_DATA][1] and 0 <= length <= size - start):
            raise ValueError("a column lies outside its file")
        if name in chunks:
            several.add(name)
        chunks[name] = Chunk({k: meta[k] for k in _M_KEPT if k in meta}, start, length)
    return Group(group[_G_ROWS][1], {n: c for n, c in chunks.items() if n not in several})


class Copied(NamedTuple):
    """A column that is another file's."""

    file: BinaryIO
    layout: Layout
    column: str
    #: Row groups that are copied, in order.
    groups: Sequence[int]

    def group(self, number: int) -> Group:
        return self.layout.groups[self.groups[number]]

    def chunk(self, number: int) -> Chunk:
        """The column in one of the groups."""
        return self.group(number).chunks[self.column]

    def blocks(self, number: int) -> Iterator[bytes]:
        """Its bytes.

        Raises:
            OSError: it cannot be read, or was cut short meanwhile.
        """
        chunk = self.chunk(number)
        self.file.seek(chunk.start)
        left = chunk.length
        while left:
            block = self.file.read(min(left, _BLOCK))
            if not block:
                raise OSError(errno.EIO, "it was cut short while it was copied", self.file.name)
            left -= len(block)
            yield block


def equal(one: Copied, other: Copied) -> bool:
    """Whether two columns are the same to the byte; of others nothing is known.

    Raises:
        OSError: one cannot be read, or was cut short meanwhile.
    """
    if len(one.groups) != len(other.groups) or not alike(
        one.layout, one.column, other.layout, other.column
    ):
        return False
    for number in range(len(one.groups)):
        if one.group(number).rows != other.group(number).rows:
            return False
        if _read_as(one.chunk(number)) != _read_as(other.chunk(number)):
            return False
        blocks = zip(one.blocks(number), other.blocks(number), strict=True)
        if any(mine != its for mine, its in blocks):
            return False
    return True


def _read_as(chunk: Chunk) -> Struct:
    """What a chunk's bytes are read by, wherever they lie."""
    meta = {key: field for key, field in chunk.meta.items() if key in _M_READ}
    if _M_DICTIONARY in chunk.meta:
        meta[_M_DATA] = I64, chunk.meta[_M_DATA][1] - chunk.start
    return meta


class Writer:
    """Writes a table, a row group at a time, some of whose columns are copied."""

    def __init__(
        self,
        file: BinaryIO,
        empty: Layout,
        schema: Mapping[str, Any],
        copied: Mapping[str, Copied],
    ) -> None:
        """Begin an empty file.

        Args:
            file: what is written to, from its beginning.
            empty: a file of the same schema (:func:`empty`).
            schema: columns and types of the table.
            copied: columns that are copied, each :func:`alike`.
        """
        self._file = file
        self._schema = schema
        self._copied = copied
        self._own = [name for name in schema if name not in copied]
        self._footer = empty.footer
        self._groups: list[Struct] = []
        self._rows = 0
        self._end = file.write(_MAGIC)

    def add(self, table: pl.DataFrame) -> None:
        """A row group: the table's own columns are encoded, the others copied.

        Raises:
            ValueError: what is copied has another number of rows.
            OSError: the file cannot be written, or another not read.
        """
        made = io.BytesIO()
        table.select(self._own).write_parquet(
            made, compression="lz4", statistics=False, row_group_size=max(1, table.height)
        )
        (own,) = layout(made).groups
        start, columns = self._end, []
        for name in self._schema:
            copied = self._copied.get(name)
            if copied is None:
                chunk = own.chunks[name]
                data = made.getbuffer()[chunk.start : chunk.start + chunk.length]
                columns.append(self._append(name, chunk, [data]))
                continue
            number = len(self._groups)
            rows = copied.group(number).rows
            if rows != table.height:
                raise ValueError(f"{rows} rows of {name} are copied beside {table.height}")
            columns.append(self._append(name, copied.chunk(number), copied.blocks(number)))
        metas = [column[_C_META][1] for column in columns]
        self._groups.append(
            {
                _G_COLUMNS: (LIST, (STRUCT, columns)),
                _G_BYTES: (I64, sum(meta[_M_UNCOMPRESSED][1] for meta in metas)),
                _G_ROWS: (I64, table.height),
                _G_START: (I64, start),
                _G_COMPRESSED: (I64, self._end - start),
                _G_NUMBER: (I16, len(self._groups)),
            }
        )
        self._rows += table.height

    def _append(self, name: str, chunk: Chunk, data: Iterable[bytes | memoryview]) -> Struct:
        moved = self._end - chunk.start
        meta = dict(chunk.meta)
        meta[_M_PATH] = LIST, (BINARY, [name.encode(), *meta[_M_PATH][1][1][1:]])
        for place in (_M_DATA, _M_DICTIONARY):
            if place in meta:
                meta[place] = I64, meta[place][1] + moved
        for block in data:
            self._file.write(block)
        self._end += chunk.length
        return {_C_START: (I64, self._end), _C_META: (STRUCT, meta)}

    def finish(self) -> None:
        """Write the footer; the file is whole once it is closed."""
        footer = {
            **self._footer,
            _ROWS: (I64, self._rows),
            _GROUPS: (LIST, (STRUCT, self._groups)),
        }
        data = thrift.encoded(footer)
        self._file.write(data + len(data).to_bytes(4, "little") + _MAGIC)


def empty(schema: Mapping[str, Any], metadata: dict[str, str]) -> Layout:
    """The layout of a table without rows."""
    file = io.BytesIO()
    pl.DataFrame(schema=schema).write_parquet(file, metadata=metadata)
    return layout(file)


def alike(one: Layout, column: str, other: Layout, named: str) -> bool:
    """Whether two files hold these columns in one form, each as a single chunk a row group."""
    return (
        column in one.columns
        and one.columns[column] == other.columns.get(named)
        and all(column in group.chunks for group in one.groups)
    )
