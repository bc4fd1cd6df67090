"""Thrift's compact protocol, in which the footers of Parquet files are written.

A struct is a dict of its fields, a field a pair of its type and value; a list's value is the type
and the values of its elements. What is decoded is encoded again as it was, names unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, STRUCT = (*range(1, 11), 12)
_WHOLE = (I16, I32, I64)
#: Structs and lists within one another at most; a Parquet footer has six.
_DEEPEST = 32

Field = tuple[int, Any]
Struct = dict[int, Field]


def decoded(data: bytes) -> Struct:
    """The struct that ``data`` begins with.

    Raises:
        ValueError: it does not begin with one.
    """
    try:
        return _Reader(data).struct(0)
    except (IndexError, struct.error) as error:
        raise ValueError("a struct is cut short") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int) -> Struct:
        found: Struct = {}
        number = 0
        while head := self._byte():
            step = head >> 4
            number = number + step if step else self._whole()
            found[number] = head & 15, self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind in _WHOLE:
            return self._whole()
        if kind == BINARY:
            return self._taken(self._number())
        if kind == STRUCT and depth < _DEEPEST:
            return self.struct(depth + 1)
        if kind in (LIST, SET) and depth < _DEEPEST:
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._number()
            kind = head & 15
            if kind in (TRUE, FALSE):  # a byte each, unlike those of fields
                return kind, [self._byte() == TRUE for _ in range(count)]
            return kind, [self._value(kind, depth + 1) for _ in range(count)]
        if kind == BYTE:
            return self._byte()
        if kind == DOUBLE:
            return struct.unpack("<d", self._taken(8))[0]
        raise ValueError(f"type {kind} in a struct")

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _taken(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError("a struct is cut short")
        self._at += length
        return self._data[self._at - length : self._at]

    def _number(self) -> int:
        found = shift = 0
        while shift < 64:
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
            shift += 7
        raise ValueError("a number of more than 64 bits")

    def _whole(self) -> int:
        number = self._number()
        return (number >> 1) ^ -(number & 1)


def encoded(fields: Struct) -> bytes:
    """A struct, as :func:`decoded` reads it."""
    out = bytearray()
    _struct(fields, out)
    return bytes(out)


def _struct(fields: Struct, out: bytearray) -> None:
    last = 0
    for number in sorted(fields):
        kind, value = fields[number]
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        if 0 < number - last < 16:
            out.append((number - last) << 4 | kind)
        else:
            out.append(kind)
            _whole(number, out)
        last = number
        if kind not in (TRUE, FALSE):
            _value(kind, value, out)
    out.append(0)


def _value(kind: int, value: Any, out: bytearray) -> None:
    if kind in _WHOLE:
        _whole(value, out)
    elif kind == BINARY:
        _number(len(value), out)
        out += value
    elif kind == STRUCT:
        _struct(value, out)
    elif kind in (LIST, SET):
        _list(value[0], value[1], out)
    elif kind == DOUBLE:
        out += struct.pack("<d", value)
    else:
        out.append(value)


def _list(kind: int, values: Sequence[Any], out: bytearray) -> None:
    out.append(min(len(values), 15) << 4 | kind)
    if len(values) >= 15:
        _number(len(values), out)
    for value in values:
        if kind in (TRUE, FALSE):
            out.append(TRUE if value else FALSE)
        else:
            _value(kind, value, out)


def _number(number: int, out: bytearray) -> None:
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)


def _whole(number: int, out: bytearray) -> None:
    _number(number << 1 if number >= 0 else (-number << 1) - 1, out)
