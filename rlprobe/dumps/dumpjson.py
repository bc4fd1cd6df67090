"""Read msprobe's dump.json and debug.json into columns.

The format (msprobe 26.2, ``core/dump/data_dump``) is almost JSON: ``{"task", "level", "framework",
"dump_data_dir", "data": {name: {slot: leaves}}}`` with bare ``NaN`` and ``Infinity``. A leaf is
``{"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"[, "data_name", "md5"]}``
or a scalar ``{"type", "value"}``; rlprobe adds ``"Sketch"`` and ``"Digest"``. Leaves nest in lists
and mappings.

A file may come from anybody: its size, nesting, numbers and names are bounded. What is no such file
raises :class:`~rlprobe.errors.DumpError`. An entry or leaf that cannot be read, and a key that
stands twice, is a row of dtype ``unreadable`` whose ``value`` says why; slots that msprobe does not
know are records like any other, and keys of a leaf that it does not know are counted and said.
"""

from __future__ import annotations

import json
import logging
import math
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import UTF_16, UTF_16_MARKS, DocumentError
from rlprobe.dumps import anyentry, repeated
from rlprobe.dumps.anyentry import MAX_DEPTH as MAX_DEPTH
from rlprobe.dumps.anyentry import NULL, Unknown
from rlprobe.dumps.leafcolumns import (
    DEBUG,
    ENTRY,
    EXACT_INTEGER,
    GRAD,
    INPUT,
    OUTPUT,
    PARAMETERS,
    Leaf,
    columns,
    encodable,
    with_names,
)
from rlprobe.dumps.schema import UNREADABLE_DTYPE
from rlprobe.errors import DumpError
from rlprobe.terminal import counted, short

#: Refused above this: the largest dump.json seen in practice is some hundred MB.
MAX_BYTES = 8 << 30
MAX_NAME = 4096
#: More records than this that cannot be read make a file one of another form.
MAX_ODD = 1000
#: Leaves turned into columns at a time, so that Python objects of a huge file don't pile up.
_CHUNK = 1 << 17


_log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """The usual shape of one call; what doesn't fit is decoded generically."""

    #: Said by msprobe of calls that recomputation repeats; no value of the call.
    is_recompute: Any = None

    input_args: list[Leaf | list[Leaf | None] | None] | None = None
    input_kwargs: dict[str, Leaf | list[Leaf | None] | None] | None = None
    input: list[Leaf | list[Leaf | None] | None] | None = None
    output: list[Leaf | list[Leaf | None] | None] | None = None
    parameters: dict[str, Leaf | None] | None = None


class _File(msgspec.Struct):
    data: dict[str, msgspec.Raw] | None = None
    task: str | None = None
    level: str | None = None
    framework: str | None = None
    dump_data_dir: str | None = None


_FILE = msgspec.json.Decoder(_File)
_ENTRY = msgspec.json.Decoder(_Entry)
_GRADS = msgspec.json.Decoder(dict[str, list[Leaf]])
_ONE = msgspec.json.Decoder(Leaf)
_ANY = msgspec.json.Decoder()

#: JSON strings of the same length stand in for the bare tokens, which strict parsers refuse.
_TOKENS = ((b"-Infinity", b'"-Infini"'), (b"Infinity", b'"Infini"'), (b"NaN", b'"N"'))
_INFINITY = b"Infinity"
_BEFORE, _AFTER = b" \t\r\n:[,", b" \t\r\n,]}"


def read(path: Path) -> pl.DataFrame:
    """All leaves of one file, columns :data:`LEAF_SCHEMA`, in msprobe's row order.

    Raises:
        DumpError: missing, truncated, too large, or not in the format.
    """
    frames = []
    names: list[str] = []
    whole, twice = _whole(path)
    odd = _Odd(path)
    unknown = Unknown()
    chunk = _Chunk(unknown, odd)
    for name, raw in (whole.data or {}).items():
        try:
            chunk.add(name, raw, len(names))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            chunk.add_odd(len(names), odd.leaf(name, error))
        names.append(encodable(name[:MAX_NAME]))
        if len(chunk.leaves) >= _CHUNK:
            frames.append(_frame(chunk, names, odd))
            chunk = _Chunk(unknown, odd)
    for name, reason in twice:
        chunk.add_odd(len(names), odd.leaf(name, ValueError(reason)))
        names.append(encodable(name[:MAX_NAME]))
    frames.append(_frame(chunk, names, odd))
    found = pl.concat(frames)
    if odd.count > len(twice) and odd.count >= found.height:
        raise DumpError(f"{path}: {odd.first}")
    for slot, count in unknown.slots.most_common():
        # whoever compares it says so once, of all files (the summary's notes)
        _log.debug(
            "%s: msprobe knows no slot %r (in %s); its values are compared like any other",
            path,
            slot[:MAX_NAME],
            counted(count, "entry", "entries"),
        )
    for key, count in unknown.keys.most_common():
        _log.warning(
            "%s: msprobe knows no key %r of a tensor or scalar (of %d); it is not compared",
            path,
            key[:MAX_NAME],
            count,
        )
    if whole.framework == _MINDSPORE:
        found = found.with_columns(pl.col("dtype").replace(_DTYPES))
    return with_names(found, names)


#: msprobe's word for a framework, and what PyTorch calls its types of elements.
_MINDSPORE = "mindspore"
_DTYPES = {
    "BFloat16": "torch.bfloat16",
    "Bool": "torch.bool",
    **{f"Float{bits}": f"torch.float{bits}" for bits in (16, 32, 64)},
    **{f"Complex{bits}": f"torch.complex{bits}" for bits in (64, 128)},
    **{
        f"{sign}Int{bits}": f"torch.{sign.lower()}int{bits}"
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
}


#: Characters of a name that a message shows.
_SHOWN = 120


class _Odd:
    """What of a file cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.count = 0
        self.first = ""

    def leaf(self, name: str, error: Exception) -> Leaf:
        """What stands for it.

        Raises:
            DumpError: it is one too many.
        """
        self.count += 1
        self.first = self.first or f"{short(encodable(name[:MAX_NAME]), _SHOWN)}: {error}"
        if self.count > MAX_ODD:
            raise DumpError(
                f"{self._path}: more than {MAX_ODD} records cannot be read; the first: {self.first}"
            )
        return Leaf(type=UNREADABLE_DTYPE, value=encodable(str(error)))


def _frame(chunk: _Chunk, names: list[str], odd: _Odd) -> pl.DataFrame:
    """A chunk's columns; leaves that have none are replaced, found by halving."""
    try:
        return columns(chunk.ordinal, chunk.slots, chunk.indices, chunk.leaves)
    except ValueError as error:
        if len(chunk.leaves) > 1:
            return pl.concat([_frame(half, names, odd) for half in chunk.halves()])
        name = f"{names[chunk.ordinal[0]]}, {chunk.slots[0]} {chunk.indices[0]}"
        chunk.leaves[0] = odd.leaf(name, error)
        chunk.slots[0] = encodable(chunk.slots[0])
        chunk.indices[0] = encodable(str(chunk.indices[0]))
        return columns(chunk.ordinal, chunk.slots, chunk.indices, chunk.leaves)


def _whole(path: Path) -> tuple[_File, list[tuple[str, str]]]:
    """The file, entries still to be decoded, and in which of them keys stand twice, what of it."""
    text = _bytes(path)
    try:
        file = _decoded(text)
        return file, repeated.keys(text, file.data or {})
    except (msgspec.MsgspecError, RecursionError) as error:
        first = error
    # A bare token inside a string makes the substitution wrong: the standard library's parser is
    # slower but takes the tokens as they are.
    try:
        whole = jsonfile.parse(bytes(_bytes(path)), nonfinite=True, depth=MAX_DEPTH, any_text=True)
    except DocumentError as error:
        raise DumpError(f"{path} {_no_json(_bytes(path)) or _INCOMPLETE.format(error)}") from error
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), dict | None):
        raise DumpError(f"{path} is not an msprobe dump file: {first}")
    data = whole.get("data") or {}
    again = {name: msgspec.Raw(json.dumps(_marked(entry)).encode()) for name, entry in data.items()}
    framework = whole.get("framework")
    file = _File(again, framework=framework if isinstance(framework, str) else None)
    return file, repeated.searched(_bytes(path))


_INCOMPLETE = (
    "is not a complete dump file ({}); the run that wrote it was probably interrupted: collect it "
    "again"
)


def _no_json(text: bytearray) -> str | None:
    """What a file is that holds no JSON at all; None where it begins like some."""
    if not text.strip():
        return "is empty: the run that wrote it was probably interrupted, or the disk full"
    if text.startswith(UTF_16_MARKS):
        return f"is {UTF_16}"
    if text.startswith((b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ")):
        return "is compressed: unpack it first"
    return None


def _decoded(text: bytearray) -> _File:
    """The file, entries still raw; bare tokens in ``text`` are replaced where there are any."""
    try:
        return _FILE.decode(text)
    except msgspec.MsgspecError:  # mostly a bare token, which is not looked for in every file
        return _FILE.decode(_strict(text))


def _bytes(path: Path) -> bytearray:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would wait for whoever writes into it
            what = "a directory" if stat.S_ISDIR(status.st_mode) else "no file"
            raise DumpError(f"{path} is {what}: a dump is a file of that name")
        size = status.st_size
        if size > MAX_BYTES:
            raise DumpError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        buffer = bytearray(size)
        with path.open("rb") as file:
            del buffer[file.readinto(buffer) :]
    except OSError as error:
        where = f" (a link to {path.readlink()})" if path.is_symlink() else ""
        raise DumpError(f"{path}{where} cannot be read: {error.strerror or error}") from error
    return buffer


def _strict(text: bytearray) -> bytearray:
    """The text with bare non-finite tokens replaced in place by strings."""
    for token, marker in _TOKENS if _INFINITY in text else _TOKENS[-1:]:
        at = text.find(token)
        while at >= 0:
            end = at + len(token)
            before, after = text[at - 1 : at], text[end : end + 1]
            if before and before in _BEFORE and (not after or after in _AFTER):
                text[at:end] = marker
            at = text.find(token, end)
    return text


def _marked(node: Any) -> Any:
    """Non-finite floats as the strings :func:`_strict` uses, so that one decoder reads both."""
    if isinstance(node, float) and not math.isfinite(node):
        return "N" if math.isnan(node) else "Infini" if node > 0 else "-Infini"
    if isinstance(node, dict):
        return {key: _marked(value) for key, value in node.items()}
    return [_marked(value) for value in node] if isinstance(node, list) else node


class _Chunk:
    """Leaves of some entries, as parallel lists."""

    def __init__(self, unknown: Unknown, odd: _Odd) -> None:
        self.unknown, self.odd = unknown, odd
        self.ordinal: list[int] = []
        self.slots: list[str] = []
        self.indices: list[Any] = []
        self.leaves: list[Leaf] = []

    def add(self, name: str, raw: Any, number: int) -> None:
        """Append the leaves of one entry: inputs, parameters, outputs (msprobe's row order)."""
        if len(name) > MAX_NAME:
            raise ValueError(f"its name has {len(name)} characters")
        if not name.isascii():
            name.encode()  # half a character, which JSON may hold and no file
        start = len(self.leaves)
        try:
            regular = self._typed(name, raw)
        except msgspec.DecodeError:
            regular = False
        if not regular:
            # Deeply nested values, large integers, point-to-point operations: the general reader.
            del self.slots[start:], self.indices[start:], self.leaves[start:]
            for slot, index, node in anyentry.nodes(name, self._any(raw), self.unknown):
                self.slots.append(slot)
                self.indices.append(index)
                self.leaves.append(
                    node if node.__class__ is Leaf else self._leaf(node, name, slot, index)
                )
        self.ordinal.extend([number] * (len(self.leaves) - start))

    def _leaf(self, node: Any, name: str, slot: str, index: str) -> Leaf:
        try:
            return anyentry.leaf(node, self.unknown)
        except ValueError as error:
            return self.odd.leaf(f"{name}, {slot} {index}", error)

    @staticmethod
    def _any(raw: msgspec.Raw) -> Any:
        try:
            return _ANY.decode(raw)
        except msgspec.DecodeError:
            return anyentry.decoded(bytes(raw))

    def add_odd(self, number: int, leaf: Leaf) -> None:
        """Append what stands for an entry; leaves of it that were read before go."""
        del self.slots[len(self.ordinal) :], self.indices[len(self.ordinal) :]
        del self.leaves[len(self.ordinal) :]
        self.ordinal.append(number)
        self.slots.append(ENTRY)
        self.indices.append("")
        self.leaves.append(leaf)

    def halves(self) -> Iterator[_Chunk]:
        """The same in two chunks."""
        middle = len(self.leaves) // 2
        for part in (slice(None, middle), slice(middle, None)):
            half = _Chunk(self.unknown, self.odd)
            half.ordinal, half.slots = self.ordinal[part], self.slots[part]
            half.indices, half.leaves = self.indices[part], self.leaves[part]
            yield half

    def _typed(self, name: str, raw: Any) -> bool:
        if name.endswith(".debug"):
            return self._append(DEBUG, (("", _ONE.decode(raw)),))
        regular = True
        if ".parameters_grad" in name[-24:]:
            for key, several in _GRADS.decode(raw).items():
                regular &= self._append(GRAD, [(key, leaf) for leaf in several])
            return regular
        entry = _ENTRY.decode(raw)
        for slot, nested in (
            (INPUT, entry.input_args),
            (INPUT, entry.input_kwargs),
            (INPUT, entry.input),
            (PARAMETERS, entry.parameters),
            (OUTPUT, entry.output),
        ):
            if nested:
                pairs = nested.items() if isinstance(nested, dict) else enumerate(nested)
                regular &= self._append(slot, pairs)
        return regular

    def _append(self, slot: str, pairs: Iterable[tuple[Any, Any]]) -> bool:
        """Append decoded leaves; False when one of them is not what it was decoded as."""
        regular = True
        slots, indices, leaves = self.slots, self.indices, self.leaves
        for key, leaf in pairs:
            if leaf.__class__ is list:
                inner = [(f"{key}.{number}", child) for number, child in enumerate(leaf)]
                regular &= self._append(slot, inner)
                continue
            if leaf is None:
                leaf = NULL
            elif leaf.type is None or (
                (
                    (leaf.Max.__class__ is float and abs(leaf.Max) >= EXACT_INTEGER)
                    or (leaf.Min.__class__ is float and abs(leaf.Min) >= EXACT_INTEGER)
                )
                and "float" not in (leaf.dtype or "")
            ):
                regular = False
            slots.append(slot)
            indices.append(key)
            leaves.append(leaf)
        return regular
