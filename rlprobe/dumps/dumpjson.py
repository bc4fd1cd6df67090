"""Read msprobe's dump.json and debug.json into columns.

The format (msprobe 26.2, ``core/dump/data_dump``) is almost JSON: ``{"task", "level", "framework",
"dump_data_dir", "data": {name: {slot: leaves}}}`` with bare ``NaN`` and ``Infinity``. A leaf is
``{"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"[, "data_name", "md5"]}``
or a scalar ``{"type", "value"}``; rlprobe adds ``"Sketch"`` and ``"Digest"``. Leaves nest in lists
and mappings.

A file may come from anybody: its size, nesting, numbers and names are bounded. What is no such file
raises :class:`~rlprobe.errors.DumpError`. An entry or leaf that cannot be read, and a key that
stands twice, is a row of dtype ``unreadable`` whose ``value`` says why; slots that msprobe does not
know are records like any other.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps import repeated
from rlprobe.dumps.leafcolumns import (
    DEBUG,
    ENTRY,
    GRAD,
    INPUT,
    MAX_DIMENSION,
    NONFINITE,
    OUTPUT,
    PARAMETERS,
    Leaf,
    columns,
    encodable,
    number,
    with_names,
)
from rlprobe.dumps.schema import UNREADABLE_DTYPE
from rlprobe.errors import DumpError

#: Refused above this: the largest dump.json seen in practice is some hundred MB.
MAX_BYTES = 8 << 30
#: msprobe's own recursion limit for nested arguments.
MAX_DEPTH = 400
MAX_NAME = 4096
#: More records than this that cannot be read make a file one of another form.
MAX_ODD = 1000
#: Integers from here on do not fit a float64 exactly; their text is kept in ``value``.
EXACT_INTEGER = 1 << 53
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
    entries, twice = _entries(path)
    odd = _Odd(path)
    unknown: Counter[str] = Counter()
    chunk = _Chunk(unknown)
    for name, raw in entries.items():
        try:
            chunk.add(name, raw, len(names))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            chunk.add_odd(len(names), odd.leaf(name, error))
        names.append(encodable(name[:MAX_NAME]))
        if len(chunk.leaves) >= _CHUNK:
            frames.append(_frame(chunk, names, odd))
            chunk = _Chunk(unknown)
    for name, reason in twice:
        chunk.add_odd(len(names), odd.leaf(name, ValueError(reason)))
        names.append(encodable(name[:MAX_NAME]))
    frames.append(_frame(chunk, names, odd))
    found = pl.concat(frames)
    if odd.count > len(twice) and odd.count >= found.height:
        raise DumpError(f"{path}: {odd.first}")
    for slot, count in unknown.most_common():
        _log.warning(
            "%s: msprobe knows no slot %r (in %d entries); its values are compared like any other",
            path,
            slot[:MAX_NAME],
            count,
        )
    return with_names(found, names)


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
        self.first = self.first or f"{encodable(name[:MAX_NAME])}: {error}"
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


def _entries(path: Path) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The entries still to be decoded, and in which of them keys stand twice, with what of it."""
    text = _bytes(path)
    try:
        entries = _decoded(text)
        return entries, repeated.keys(text, entries)
    except (msgspec.MsgspecError, RecursionError) as error:
        first = error
    # A bare token inside a string makes the substitution wrong: the standard library's parser is
    # slower but takes the tokens as they are.
    try:
        whole = jsonfile.parse(bytes(_bytes(path)), nonfinite=True, depth=MAX_DEPTH)
    except DocumentError as error:
        raise DumpError(
            f"{path} is not a complete dump file ({error}); the run that wrote it was probably "
            "interrupted: collect it again"
        ) from error
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), dict | None):
        raise DumpError(f"{path} is not an msprobe dump file: {first}")
    data = whole.get("data") or {}
    again: dict[str, Any] = {
        name: json.dumps(_marked(entry)).encode() for name, entry in data.items()
    }
    return again, repeated.searched(_bytes(path))


def _decoded(text: bytearray) -> dict[str, Any]:
    """The entries, still raw; bare tokens in ``text`` are replaced where there are any."""
    try:
        return _FILE.decode(text).data or {}
    except msgspec.MsgspecError:  # mostly a bare token, which is not looked for in every file
        return _FILE.decode(_strict(text)).data or {}


def _bytes(path: Path) -> bytearray:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DumpError(f"{path} has {size} bytes; at most {MAX_BYTES} are read")
        buffer = bytearray(size)
        with path.open("rb") as file:
            del buffer[file.readinto(buffer) :]
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
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

    def __init__(self, unknown: Counter[str]) -> None:
        #: Slots of no known name, and in how many entries.
        self.unknown = unknown
        self.ordinal: list[int] = []
        self.slots: list[str] = []
        self.indices: list[Any] = []
        self.leaves: list[Leaf] = []

    def add(self, name: str, raw: Any, number: int) -> None:
        """Append the leaves of one entry: inputs, parameters, outputs (msprobe's row order)."""
        if len(name) > MAX_NAME:
            raise ValueError(f"its name has {len(name)} characters")
        start = len(self.leaves)
        try:
            regular = self._typed(name, raw)
        except msgspec.ValidationError:
            regular = False
        if not regular:
            # Deeply nested values, large integers, point-to-point operations: the general reader.
            del self.slots[start:], self.indices[start:], self.leaves[start:]
            for slot, index, leaf in _general(name, _ANY.decode(raw), self.unknown):
                self.slots.append(slot)
                self.indices.append(index)
                self.leaves.append(leaf)
        self.ordinal.extend([number] * (len(self.leaves) - start))

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
            half = _Chunk(self.unknown)
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
                leaf = _NULL
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


#: A null argument is a row of msprobe's tables, so it is a record here.
_NULL = Leaf()


def _general(name: str, entry: Any, unknown: Counter[str]) -> Iterator[tuple[str, str, Leaf]]:
    if name.endswith(".debug"):
        yield from _walk(entry, DEBUG, "", 0)
        return
    if not isinstance(entry, dict):
        raise ValueError(f"an object was expected, found {type(entry).__name__}")
    if "parameters_grad" in name.split(".")[-2:]:
        for key, several in entry.items():
            for leaf in several if isinstance(several, list) else [several]:
                for _, index, inner in _walk(leaf, GRAD, str(key), 0):
                    yield GRAD, index, inner
        return
    for slot, key in (
        (INPUT, "input_args"),
        (INPUT, "input_kwargs"),
        (INPUT, "input"),
        (PARAMETERS, "parameters"),
        (OUTPUT, "output"),
    ):
        if key in entry and entry[key] is not None:
            yield from _walk(entry[key], slot, "", 0)
    for key, value in entry.items():
        if key not in _SLOTS and value is not None:
            unknown[key] += 1
            yield from _walk(value, key, "", 0, bare=True)


_SLOTS = frozenset(_Entry.__struct_fields__)


def _walk(
    node: Any, slot: str, index: str, depth: int, bare: bool = False
) -> Iterator[tuple[str, str, Leaf]]:
    """Leaves below a node; ``bare``: plain values are leaves too."""
    if depth > MAX_DEPTH:
        raise ValueError(f"arguments nest deeper than {MAX_DEPTH}")
    if node is None:
        yield slot, index, _NULL
    elif isinstance(node, list):
        for number, child in enumerate(node):
            inner = f"{index}.{number}" if index else str(number)
            yield from _walk(child, slot, inner, depth + 1, bare)
    elif isinstance(node, dict):
        if node.get("class_type") == "torch.distributed.P2POp":
            tensor = node.get("tensor")
            yield slot, index, _leaf(tensor) if isinstance(tensor, dict) else _NULL
        elif isinstance(node.get("type"), str):
            yield slot, index, _leaf(node)
        else:
            for key, child in node.items():
                inner = f"{index}.{key}" if index else str(key)
                yield from _walk(child, slot, inner, depth + 1, bare)
    elif bare:
        yield slot, index, Leaf(type=type(node).__name__, value=node)
    else:
        raise ValueError(f"a tensor, scalar, list or object was expected, found {node!r:.40}")


def _leaf(node: dict[str, Any]) -> Leaf:
    """A leaf decoded without a type to guide it."""
    shape = node.get("shape")
    if shape is not None and not (
        isinstance(shape, list) and all(type(n) is int and 0 <= n < MAX_DIMENSION for n in shape)
    ):
        raise ValueError(f"shape {shape!r:.60} is no list of sizes")
    numbers = {key: number(node.get(key), key) for key in ("Max", "Min", "Mean", "Norm")}
    md5 = node.get("md5")
    value = node.get("value")
    if node["type"] == "float" and isinstance(value, str):
        value = NONFINITE.get(value, value)
    elif node["type"] == "torch.ProcessGroup":
        value = node.get("group_ranks")
    exact = [node.get(key) for key in ("Max", "Min")]
    if any(type(n) is int and abs(n) >= EXACT_INTEGER for n in exact):
        value = {"Max": exact[0], "Min": exact[1]}
    grad = node.get("requires_grad")
    return Leaf(
        type=node["type"],
        dtype=_text(node.get("dtype"), "dtype"),
        shape=None if shape is None else tuple(shape),
        requires_grad=grad if isinstance(grad, bool) else None,
        data_name=_text(node.get("data_name"), "data_name"),
        # xor checksums of 0-dimensional tensors are written as numbers
        md5=md5 if isinstance(md5, str) or md5 is None else f"xor:{md5!r}",
        value=value,
        Sketch=_text(node.get("Sketch"), "Sketch"),
        Digest=_text(node.get("Digest"), "Digest"),
        **numbers,
    )


def _text(value: Any, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{key} is {value!r:.40}, not a string")
