"""Leaves of a dump file (tensors and scalars) as typed columns."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import msgspec
import polars as pl

from rlprobe.dumps import apinames
from rlprobe.dumps.schema import FLOATS, LEAF_SCHEMA, WHOLE

INPUT, PARAMETERS, OUTPUT, GRAD, DEBUG = "input", "parameters", "output", "grad", "debug"
#: Slot of the row that stands for an entry which cannot be read.
ENTRY = "entry"
MAX_DIMENSIONS = 64
MAX_DIMENSION = 1 << 62
MAX_SKETCH_BYTES = 1 << 16
#: Integers from here on do not fit a float64 exactly.
EXACT_INTEGER = 1 << 53

#: A statistic: bool for boolean tensors, a string for what is not finite.
Number = float | bool | str | None


class Leaf(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A tensor or scalar as the file has it; ``type`` is None for anything that is no leaf.

    What has further keys is read by :mod:`rlprobe.dumps.anyentry`, which knows what they say.
    """

    type: str | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    Max: Number = None
    Min: Number = None
    Mean: Number = None
    Norm: Number = None
    requires_grad: bool | None = None
    data_name: str | None = None
    md5: str | None = None
    value: Any = None
    Sketch: str | None = None
    Digest: str | None = None
    #: How a DTensor is laid over its devices; its statistics are those of the local part.
    device_mesh: Any = None
    placements: Any = None
    #: What rlprobe's own capture says besides: whether a statistic that is not finite overflowed,
    #: and which part of a sharded parameter this is.
    NonFinite: Any = None
    GlobalShape: Any = None
    Offset: Any = None


#: What stands for a number that is not finite: Python's and JSON's spellings, and the markers that
#: :mod:`rlprobe.dumps.dumpjson` puts in place of bare tokens.
NONFINITE = {
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


def columns(
    ordinal: list[int], slots: list[str], indices: list[Any], leaves: list[Leaf]
) -> pl.DataFrame:
    """Columns of some leaves; ``ordinal`` numbers the entries of the file.

    Raises:
        ValueError: a shape, statistic or sketch is not acceptable.
    """
    try:
        return pl.DataFrame(
            {
                "ordinal": pl.Series(ordinal, dtype=pl.UInt32),
                "slot": pl.Series(slots, dtype=pl.String),
                "index": pl.Series(
                    [i if i.__class__ is str else str(i) for i in indices], dtype=pl.String
                ),
                "dtype": pl.Series([leaf.dtype or leaf.type for leaf in leaves], dtype=pl.String),
                "shape": _shapes([leaf.shape for leaf in leaves]),
                "requires_grad": _series([leaf.requires_grad for leaf in leaves], pl.Boolean),
                "max": _numbers([leaf.Max for leaf in leaves]),
                "min": _numbers([leaf.Min for leaf in leaves]),
                "mean": _numbers([leaf.Mean for leaf in leaves]),
                "norm": _numbers([leaf.Norm for leaf in leaves]),
                "value": _series(
                    [
                        _value(leaf) if leaf.dtype is None or leaf.value is not None else None
                        for leaf in leaves
                    ],
                    pl.String,
                ),
                "digest": _digests(leaves),
                "data_name": _series([leaf.data_name for leaf in leaves], pl.String),
                "sketch": _sketches(leaves),
            }
        )
    except OverflowError as error:
        raise ValueError(str(error)) from error


def _numbers(values: list[Number]) -> pl.Series:
    try:
        return _series(values, pl.Float64)
    except (TypeError, OverflowError):  # a text, a list or a huge integer among them
        return _series([number(v, "a statistic") for v in values], pl.Float64)


def _series(values: list[Any], dtype: Any, name: str = "") -> pl.Series:
    """A column; one of nothing but nulls, of which a dump has several, is not looked through."""
    if values and values[0] is None and values.count(None) == len(values):
        return pl.Series(name, [None], dtype=dtype).new_from_index(0, len(values))
    return pl.Series(name, values, dtype=dtype)


def _shapes(values: list[tuple[int, ...] | None]) -> pl.Series:
    """A dump has few distinct shapes: each is built once."""
    distinct: dict[tuple[int, ...] | None, int] = {}
    codes = [distinct.setdefault(shape, len(distinct)) for shape in values]
    for shape in distinct:
        if shape and (len(shape) > MAX_DIMENSIONS or min(shape) < 0 or max(shape) >= MAX_DIMENSION):
            raise ValueError(f"shape {shape!r:.80} is not a tensor's")
    table = pl.Series([None if s is None else list(s) for s in distinct], dtype=pl.List(pl.Int64))
    return table.gather(codes)


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it; JSON may hold halves of characters."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _value(leaf: Leaf) -> str | None:
    """Text of a scalar, or exact extremes of an integer tensor; null for other tensors."""
    value = leaf.value
    if value is None:
        return "None" if leaf.type is not None and leaf.dtype is None else None
    if leaf.type in WHOLE and leaf.dtype is None:
        value = _whole(value, leaf.type)
    if isinstance(value, str):
        if leaf.type in FLOATS and value in NONFINITE:
            return repr(NONFINITE[value])
        return value
    return json.dumps(value) if isinstance(value, dict) else repr(value)


def _whole(value: Any, kind: str) -> Any:
    """A scalar of an integer type; one that is written with a point or an exponent as it is meant.

    Raises:
        ValueError: it is no whole number, or a float64 does not hold all of its digits: two such
            that differ would read alike.
    """
    if isinstance(value, str) and value in NONFINITE:
        raise ValueError(f"a scalar of type {kind} is {NONFINITE[value]!r}")
    if not isinstance(value, float):
        return value
    if abs(value) >= EXACT_INTEGER:
        raise ValueError(
            f"a scalar of type {kind} is written with a point or an exponent and has more digits "
            "than a floating-point number holds"
        )
    if not value.is_integer():
        raise ValueError(f"a scalar of type {kind} is {value!r}")
    return int(value)


def _digests(leaves: list[Leaf]) -> pl.Series:
    """``sha256:…`` as written; msprobe's md5 field as ``crc32:…`` or ``xor:…``.

    A checksum is a number: capital letters and missing zeros before it, as versions of msprobe
    differ in them, make no other.
    """
    own = _series([leaf.Digest for leaf in leaves], pl.String, "own")
    md5 = _series([leaf.md5 for leaf in leaves], pl.String, "md5")
    if own.null_count() == len(own) and md5.null_count() == len(md5):
        return own
    hexadecimal = pl.col("md5").str.to_lowercase()
    theirs = (
        pl.when(pl.col("md5").str.starts_with("xor:"))
        .then("md5")
        .when(hexadecimal.str.starts_with("0x"))
        .then("xor:0x" + hexadecimal.str.slice(2).str.zfill(16))
        # msprobe writes zeros where the tensor was freed before its checksum was taken
        .when(pl.col("md5") != "00000000")
        .then("crc32:" + hexadecimal.str.zfill(8))
    )
    frame = pl.DataFrame([own, md5])
    return frame.select(pl.coalesce("own", theirs)).to_series()


def _sketches(leaves: list[Leaf]) -> pl.Series:
    texts = [leaf.Sketch for leaf in leaves]
    present = [text for text in texts if text is not None]
    if not present:
        return pl.Series([None], dtype=pl.List(pl.Float32)).new_from_index(0, len(leaves))
    import numpy as np  # only where there are sketches: its import is felt in small comparisons

    blobs = [_sketch_bytes(text) for text in present]
    if len({len(blob) for blob in blobs}) > 1:
        raise ValueError("sketches of different lengths in one file")
    table = np.frombuffer(b"".join(blobs), dtype="<f4").reshape(len(blobs), -1)
    rows = pl.Series(table).cast(pl.List(pl.Float32))
    if len(present) == len(texts):
        return rows
    count = iter(range(len(blobs)))
    positions = pl.Series([None if text is None else next(count) for text in texts])
    return rows.gather(positions)


def _sketch_bytes(text: str) -> bytes:
    if not text.startswith("b64:") or len(text) > MAX_SKETCH_BYTES:
        raise ValueError(f"a sketch does not start with 'b64:' or is too long: {text[:20]!r}")
    blob = base64.b64decode(text[4:], validate=True)
    if not blob or len(blob) % 4:
        raise ValueError(f"a sketch of {len(blob)} bytes is no list of float32 values")
    return blob


def number(value: Any, key: str) -> float | None:
    """A statistic as float64.

    Raises:
        ValueError: it is no number; ``key`` names it in the message.
    """
    if value is None or value in ("None", "N/A", ""):
        return None
    if isinstance(value, str):
        if value in NONFINITE:
            return NONFINITE[value]
    elif isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{key} is {value!r:.40}, not a number")


def with_names(frame: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    """Names taken apart once per entry, then spread over the entry's leaves."""
    api = pl.Series("api", names, dtype=pl.String)
    parsed = pl.concat([api.to_frame(), apinames.parse(api)], how="horizontal")
    spread = parsed[frame.get_column("ordinal")]
    frame = pl.concat([frame.drop("ordinal"), spread], how="horizontal")
    debug, grad = pl.col("slot") == DEBUG, pl.col("slot") == GRAD
    entry = pl.col("slot") == ENTRY
    plain = (
        pl.when(debug | entry)
        .then(pl.lit(""))
        .when(grad)
        .then(pl.lit("."))
        .when(pl.col("index") == "")
        .then("." + pl.col("slot"))
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
