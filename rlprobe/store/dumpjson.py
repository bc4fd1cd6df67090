"""Read msprobe's dump.json and debug.json into columns.

The format (msprobe 26.2, ``core/dump/data_dump``) is almost JSON: ``{"task", "level", "framework",
"dump_data_dir", "data": {name: {slot: leaves}}}`` with bare ``NaN`` and ``Infinity``. A leaf is
``{"type", "dtype", "shape", "Max", "Min", "Mean", "Norm", "requires_grad"[, "data_name"][, "md5"]}``
or a scalar ``{"type", "value"}``; rlprobe adds ``"Sketch"`` and ``"Digest"``. Leaves nest in lists
and mappings.

A file may come from anybody: its size, nesting, numbers and names are bounded, and whatever is not
of this format raises :class:`~rlprobe.errors.DumpError` naming the file and the entry.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from rlprobe.errors import DumpError
from rlprobe.store import apinames

#: Refused above this: the largest dump.json seen in practice is some hundred MB.
MAX_BYTES = 8 << 30
#: msprobe's own recursion limit for nested arguments.
MAX_DEPTH = 400
MAX_DIMENSIONS = 64
MAX_NAME = 4096
MAX_SKETCH_BYTES = 1 << 16
#: Integers above this do not fit a float64 exactly; their text is kept in ``value``.
EXACT_INTEGER = 1 << 53
#: Leaves turned into columns at a time, so that Python objects of a huge file don't pile up.
_CHUNK = 1 << 17

INPUT, PARAMETERS, OUTPUT, GRAD, DEBUG = "input", "parameters", "output", "grad", "debug"

#: Columns of :func:`read`, a row per leaf in msprobe's row order.
LEAF_SCHEMA: dict[str, Any] = {
    "name": pl.String,
    "module": pl.String,
    "op": pl.String,
    "call": pl.Int32,
    "direction": pl.String,
    "slot": pl.String,
    "index": pl.String,
    "dtype": pl.String,
    "shape": pl.List(pl.Int64),
    "requires_grad": pl.Boolean,
    "max": pl.Float64,
    "min": pl.Float64,
    "mean": pl.Float64,
    "norm": pl.Float64,
    "value": pl.String,
    "digest": pl.String,
    "sketch": pl.List(pl.Float32),
    "data_name": pl.String,
    "api": pl.String,
}


class Leaf(msgspec.Struct, gc=False):
    """A tensor or scalar as the file has it; ``type`` is None for anything that is no leaf."""

    type: str | None = None
    dtype: str | None = None
    shape: list[int] | None = None
    Max: float | None = None
    Min: float | None = None
    Mean: float | None = None
    Norm: float | None = None
    requires_grad: bool | None = None
    data_name: str | None = None
    md5: str | None = None
    value: Any = None
    Sketch: str | None = None
    Digest: str | None = None


class _Entry(msgspec.Struct, gc=False):
    """The usual shape of one call; what doesn't fit is decoded generically."""

    input_args: list[Leaf | None] | None = None
    input_kwargs: dict[str, Leaf | None] | None = None
    input: list[Leaf | None] | None = None
    output: list[Leaf | None] | None = None
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
_NONFINITE = {
    "N": math.nan,
    "NaN": math.nan,
    "nan": math.nan,
    "Infini": math.inf,
    "Infinity": math.inf,
    "inf": math.inf,
    "-Infini": -math.inf,
    "-Infinity": -math.inf,
    "-inf": -math.inf,
}
_BEFORE, _AFTER = b" \t\r\n:[,", b" \t\r\n,]}"


def read(path: Path) -> pl.DataFrame:
    """All leaves of one file, columns :data:`LEAF_SCHEMA`, in msprobe's row order.

    Raises:
        DumpError: missing, truncated, too large, or not in the format.
    """
    entries = _entries(path)
    frames = []
    ordinal: list[int] = []
    slots: list[str] = []
    indices: list[str] = []
    leaves: list[Leaf] = []
    names: list[str] = []
    for name, raw in entries.items():
        if len(name) > MAX_NAME:
            raise DumpError(f"{path}: an entry's name has {len(name)} characters")
        try:
            _flatten(name, raw, slots, indices, leaves)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise DumpError(f"{path}: entry {name!r}: {error}") from error
        number = len(names)
        names.append(name)
        ordinal.extend([number] * (len(leaves) - len(ordinal)))
        if len(leaves) >= _CHUNK:
            frames.append(_columns(path, ordinal, slots, indices, leaves))
            ordinal, slots, indices, leaves = [], [], [], []
    frames.append(_columns(path, ordinal, slots, indices, leaves))
    return _with_names(pl.concat(frames), names)


def _entries(path: Path) -> dict[str, Any]:
    text = _bytes(path)
    try:
        return _FILE.decode(_strict(text)).data or {}
    except (msgspec.MsgspecError, RecursionError) as error:
        first = error
    # A bare token inside a string makes the substitution wrong: the standard library's parser is
    # slower but takes the tokens as they are.
    try:
        whole = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DumpError(
            f"{path} is not a complete dump file ({error}); the run that wrote it was probably "
            "interrupted: collect it again"
        ) from error
    if not isinstance(whole, dict) or not isinstance(whole.get("data"), dict | None):
        raise DumpError(f"{path} is not an msprobe dump file: {first}")
    data = whole.get("data") or {}
    return {name: json.dumps(_marked(entry)).encode() for name, entry in data.items()}


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
    for token, marker in _TOKENS:
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


def _flatten(
    name: str, raw: Any, slots: list[str], indices: list[str], leaves: list[Leaf]
) -> None:
    """Append the leaves of one entry: inputs, parameters, outputs (msprobe's row order)."""
    last = name[-6:]
    start = len(leaves)
    try:
        if last == ".debug":
            leaf = _ONE.decode(raw)
            if leaf.type is not None:
                slots.append(DEBUG)
                indices.append("")
                leaves.append(leaf)
                return
        elif ".parameters_grad" in name[-24:]:
            for key, several in _GRADS.decode(raw).items():
                for leaf in several:
                    if leaf.type is None:
                        raise msgspec.ValidationError
                    slots.append(GRAD)
                    indices.append(key)
                    leaves.append(leaf)
            return
        else:
            entry = _ENTRY.decode(raw)
            regular = True
            for slot, several in (
                (INPUT, entry.input_args),
                (INPUT, entry.input_kwargs),
                (INPUT, entry.input),
                (PARAMETERS, entry.parameters),
                (OUTPUT, entry.output),
            ):
                if several:
                    pairs = several.items() if several.__class__ is dict else enumerate(several)
                    for key, leaf in pairs:
                        if leaf is None:
                            leaf = _NULL
                        elif leaf.type is None:
                            regular = False
                        slots.append(slot)
                        indices.append(key)
                        leaves.append(leaf)
            if regular:
                return
    except msgspec.ValidationError:
        pass
    # Nested values, booleans, non-finite numbers, point-to-point operations: the general reader.
    del slots[start:], indices[start:], leaves[start:]
    for slot, index, leaf in _general(name, _ANY.decode(raw)):
        slots.append(slot)
        indices.append(index)
        leaves.append(leaf)


#: A null argument is a row of msprobe's tables, so it is a record here.
_NULL = Leaf()


def _general(name: str, entry: Any) -> Iterator[tuple[str, str, Leaf]]:
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


def _walk(node: Any, slot: str, index: str, depth: int) -> Iterator[tuple[str, str, Leaf]]:
    if depth > MAX_DEPTH:
        raise ValueError(f"arguments nest deeper than {MAX_DEPTH}")
    if node is None:
        yield slot, index, _NULL
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from _walk(child, slot, f"{index}.{number}" if index else str(number), depth + 1)
    elif isinstance(node, dict):
        if node.get("class_type") == "torch.distributed.P2POp":
            tensor = node.get("tensor")
            yield slot, index, _leaf(tensor) if isinstance(tensor, dict) else _NULL
        elif isinstance(node.get("type"), str):
            yield slot, index, _leaf(node)
        else:
            for key, child in node.items():
                yield from _walk(child, slot, f"{index}.{key}" if index else str(key), depth + 1)
    else:
        raise ValueError(f"a tensor, scalar, list or object was expected, found {node!r:.40}")


def _leaf(node: dict[str, Any]) -> Leaf:
    """A leaf decoded without a type to guide it."""
    shape = node.get("shape")
    if shape is not None and not (
        isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    ):
        raise ValueError(f"shape {shape!r:.60} is no list of sizes")
    numbers = {key: _number(node.get(key), key) for key in ("Max", "Min", "Mean", "Norm")}
    md5 = node.get("md5")
    value = node.get("value")
    if node["type"] == "float" and isinstance(value, str):
        value = _NONFINITE.get(value, value)
    elif node["type"] == "torch.ProcessGroup":
        value = node.get("group_ranks")
    exact = [node.get(key) for key in ("Max", "Min")]
    if any(type(n) is int and abs(n) > EXACT_INTEGER for n in exact):
        value = {"Max": exact[0], "Min": exact[1]}
    grad = node.get("requires_grad")
    return Leaf(
        type=node["type"],
        dtype=_text(node.get("dtype"), "dtype"),
        shape=shape,
        requires_grad=grad if isinstance(grad, bool) else None,
        data_name=_text(node.get("data_name"), "data_name"),
        # xor checksums of 0-dimensional tensors are written as numbers
        md5=md5 if isinstance(md5, str) or md5 is None else f"0x{md5!r}",
        value=value,
        Sketch=_text(node.get("Sketch"), "Sketch"),
        Digest=_text(node.get("Digest"), "Digest"),
        **numbers,
    )


def _text(value: Any, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{key} is {value!r:.40}, not a string")


def _number(value: Any, key: str) -> float | None:
    if value is None or value in ("None", "N/A", ""):
        return None
    if isinstance(value, str):
        if value in _NONFINITE:
            return _NONFINITE[value]
    elif isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.copysign(math.inf, value)
    raise ValueError(f"{key} is {value!r:.40}, not a number")


def _columns(
    path: Path, ordinal: list[int], slots: list[str], indices: list[Any], leaves: list[Leaf]
) -> pl.DataFrame:
    """Columns of one chunk; ``ordinal`` numbers the entries of the file."""
    shapes = [leaf.shape for leaf in leaves]
    if any(len(shape) > MAX_DIMENSIONS for shape in shapes if shape):
        raise DumpError(f"{path}: a tensor has more than {MAX_DIMENSIONS} dimensions")
    files = [leaf.data_name for leaf in leaves]
    for name in files:
        if name is not None and ("/" in name or "\\" in name or name in (".", "..")):
            raise DumpError(f"{path}: data_name {name!r:.80} is no plain file name; refused")
    frame = pl.DataFrame(
        {
            "ordinal": pl.Series(ordinal, dtype=pl.UInt32),
            "slot": pl.Series(slots, dtype=pl.String),
            "index": pl.Series([i if i.__class__ is str else str(i) for i in indices], dtype=pl.String),
            "type": pl.Series([leaf.type for leaf in leaves], dtype=pl.String),
            "dtype": pl.Series([leaf.dtype for leaf in leaves], dtype=pl.String),
            "shape": pl.Series(shapes, dtype=pl.List(pl.Int64)),
            "requires_grad": pl.Series([leaf.requires_grad for leaf in leaves], dtype=pl.Boolean),
            "max": pl.Series([leaf.Max for leaf in leaves], dtype=pl.Float64),
            "min": pl.Series([leaf.Min for leaf in leaves], dtype=pl.Float64),
            "mean": pl.Series([leaf.Mean for leaf in leaves], dtype=pl.Float64),
            "norm": pl.Series([leaf.Norm for leaf in leaves], dtype=pl.Float64),
            "value": pl.Series([_value(leaf) for leaf in leaves], dtype=pl.String),
            "digest": pl.Series([_digest(leaf) for leaf in leaves], dtype=pl.String),
            "data_name": pl.Series(files, dtype=pl.String),
            "sketch": _sketches(path, leaves),
        }
    )
    return frame.with_columns(dtype=pl.coalesce("dtype", "type")).drop("type")


def _value(leaf: Leaf) -> str | None:
    value = leaf.value
    if value is None:
        return "None" if leaf.type is not None and leaf.dtype is None else None
    if value.__class__ is str:
        return str(value)
    if isinstance(value, dict | list):
        return json.dumps(value)
    return repr(value)


def _digest(leaf: Leaf) -> str | None:
    if leaf.Digest is not None:
        return leaf.Digest
    if leaf.md5 is None:
        return None
    if leaf.md5.startswith("0x"):
        return f"xor:{leaf.md5}"
    # msprobe writes this where the tensor was freed before its checksum was taken
    return None if leaf.md5 == "00000000" else f"crc32:{leaf.md5}"


def _sketches(path: Path, leaves: list[Leaf]) -> pl.Series:
    texts = [leaf.Sketch for leaf in leaves]
    null = pl.Series([None] * len(leaves), dtype=pl.List(pl.Float32))
    present = [text for text in texts if text is not None]
    if not present:
        return null
    try:
        blobs = [_sketch_bytes(text) for text in present]
    except (binascii.Error, ValueError) as error:
        raise DumpError(f"{path}: a sketch is not base64 of float32 values: {error}") from error
    if len({len(blob) for blob in blobs}) > 1:
        raise DumpError(f"{path}: sketches of different lengths in one file")
    table = np.frombuffer(b"".join(blobs), dtype="<f4").reshape(len(blobs), -1)
    rows = pl.Series(table).cast(pl.List(pl.Float32))
    if len(present) == len(texts):
        return rows
    count = iter(range(len(blobs)))
    return rows.gather([None if text is None else next(count) for text in texts])


def _sketch_bytes(text: str) -> bytes:
    if not text.startswith("b64:") or len(text) > MAX_SKETCH_BYTES:
        raise ValueError(f"{text[:20]!r} does not start with 'b64:'")
    blob = binascii.a2b_base64(text[4:], strict_mode=True)
    if not blob or len(blob) % 4:
        raise ValueError(f"{len(blob)} bytes")
    return blob


def _with_names(frame: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """Names taken apart once per entry, then spread over the entry's leaves."""
    api = pl.Series("api", names, dtype=pl.String)
    parsed = pl.concat([api.to_frame(), apinames.parse(api)], how="horizontal")
    spread = parsed[frame.get_column("ordinal")]
    frame = pl.concat([frame.drop("ordinal"), spread], how="horizontal")
    debug, grad = pl.col("slot") == DEBUG, pl.col("slot") == GRAD
    plain = (
        pl.when(debug)
        .then(pl.lit(""))
        .when(grad)
        .then(pl.lit("."))
        .otherwise("." + pl.col("slot") + ".")
    )
    separator = pl.when(debug & (pl.col("index") != "")).then(pl.lit(".")).otherwise(pl.lit(""))
    return frame.with_columns(
        # msprobe names the row after the tensor file where there is one
        name=pl.coalesce(
            pl.col("data_name").str.replace(r"\.[^.]*$", ""),
            pl.col("api") + plain + separator + pl.col("index"),
        ),
        slot=pl.when(debug)
        .then(pl.coalesce("debug_slot", pl.lit(OUTPUT)))
        .otherwise(pl.col("slot")),
        index=pl.when(debug & pl.col("debug_index").is_not_null())
        .then(pl.concat_str("debug_index", "index", separator=".").str.strip_chars_end("."))
        .otherwise(pl.col("index")),
    ).select(list(LEAF_SCHEMA))
