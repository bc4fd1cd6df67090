"""Entries of a dump file that are not of the usual shape, leaf by leaf.

Deeply nested arguments, large integers, and what :class:`~rlprobe.dumps.leafcolumns.Leaf` has no
field for: a process group's ``group_ranks``, a memory format's ``format``, the ``op``, ``peer``,
``tag`` and ``group_id`` of a point-to-point operation, which msprobe (26.2,
``core/dump/data_dump/data_processor``) writes instead of a ``value`` or beside a tensor.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlprobe.dumps.leafcolumns import (
    DEBUG,
    EXACT_INTEGER,
    GRAD,
    INPUT,
    MAX_DIMENSION,
    NONFINITE,
    OUTPUT,
    PARAMETERS,
    Leaf,
    number,
)
from rlprobe.dumps.schema import FLOATS

#: msprobe's own recursion limit for nested arguments.
MAX_DEPTH = 400
#: A null argument is a row of msprobe's tables, so it is a record here.
NULL = Leaf()

#: Keys of an entry: where its leaves are, and the slot that they are in.
_SLOTS = {
    "input_args": INPUT,
    "input_kwargs": INPUT,
    "input": INPUT,
    "parameters": PARAMETERS,
    "output": OUTPUT,
}
#: Said by msprobe of calls that recomputation repeats; no value of the call.
_OF_THE_CALL = frozenset({"is_recompute"})
#: Whether any output is NaN, which msprobe's task nan_check writes of a call.
_IS_NAN = "is_nan"
#: What an argument that has parts is called under, and what sends and receives are called there.
_CLASS = "class_type"
_P2P = frozenset({"torch.distributed.P2POp", "mindspore.mint.distributed.P2POp"})
_P2P_KEYS = ("op", "peer", "tag", "group_id")
#: Types whose value stands under another key.
_VALUES = {
    "torch.ProcessGroup": "group_ranks",
    "mindspore.ProcessGroup": "group_ranks",
    "torch.memory_format": "format",
}
#: Keys that say nothing of the numbers: a group's digest, and how a tensor is laid over devices.
_BESIDE = frozenset({"group_id", "layout", "hsdp_shard_size"})
_KNOWN = frozenset(Leaf.__struct_fields__) | _BESIDE


@dataclass
class Unknown:
    """What of a file msprobe is not known to write."""

    #: Slots of no known name, and in how many entries.
    slots: Counter[str] = field(default_factory=Counter)
    #: Keys of leaves, and of how many leaves.
    keys: Counter[str] = field(default_factory=Counter)


#: Digits that Python reads as a number; msprobe writes whatever an argument has.
_DIGITS = 4000
#: A leaf as the file has it (anything, where it is none), or one that was made of something else.
Node = Any


def decoded(raw: bytes) -> Any:
    """An entry with numbers that no machine type holds, or texts that are none.

    A whole number of more than :data:`_DIGITS` digits stays the text that it is.

    Raises:
        ValueError: it is not JSON.
    """
    return json.loads(
        raw, parse_int=lambda digits: int(digits) if len(digits) < _DIGITS else digits
    )


def nodes(name: str, entry: Any, unknown: Unknown) -> Iterator[tuple[str, str, Node]]:
    """Slot, index and leaf of everything in an entry, in msprobe's row order.

    Args:
        name, entry: the entry's name, and its value.
        unknown: slots that are not known are counted there.

    Raises:
        ValueError: it is no object, or its arguments nest too deep.
    """
    if name.endswith(".debug"):
        yield from _walk(entry, DEBUG, "")
        return
    if not isinstance(entry, dict):
        raise ValueError(f"an object was expected, found {type(entry).__name__}")
    if "parameters_grad" in name.split(".")[-2:]:
        for key, several in entry.items():
            for leaf in several if isinstance(several, list) else [several]:
                for _, index, inner in _walk(leaf, GRAD, str(key)):
                    yield GRAD, index, inner
        return
    for key, slot in _SLOTS.items():
        if key in entry and entry[key] is not None:
            yield from _walk(entry[key], slot, "")
    for key, value in entry.items():
        if key not in _SLOTS and key not in _OF_THE_CALL and value is not None:
            if key != _IS_NAN:
                unknown.slots[key] += 1
            yield from _walk(value, key, "", bare=True)


def _walk(
    node: Any, slot: str, index: str, depth: int = 0, bare: bool = False
) -> Iterator[tuple[str, str, Node]]:
    """Leaves below a node; ``bare``: plain values are leaves too."""
    if depth > MAX_DEPTH:
        raise ValueError(f"arguments nest deeper than {MAX_DEPTH}")
    if node is None:
        yield slot, index, NULL
    elif isinstance(node, list):
        for n, child in enumerate(node):
            yield from _walk(child, slot, _inner(index, n), depth + 1, bare)
    elif isinstance(node, dict):
        kind = node.get(_CLASS)
        if isinstance(kind, str) and kind in _P2P:
            yield from _point_to_point(node, slot, index)
        elif isinstance(node.get("type"), str) or isinstance(node.get("dtype"), str):
            yield slot, index, node
        else:
            # of an object that is described by its parts, plain values are parts too
            bare = bare or isinstance(kind, str)
            for key, child in node.items():
                yield from _walk(child, slot, _inner(index, key), depth + 1, bare)
    elif bare:
        yield slot, index, Leaf(type=type(node).__name__, value=node)
    else:
        yield slot, index, node


def _inner(index: str, key: Any) -> str:
    return f"{index}.{key}" if index else str(key)


def _point_to_point(node: dict[str, Any], slot: str, index: str) -> Iterator[tuple[str, str, Node]]:
    """A send or a receive: its tensor, and with whom."""
    tensor = node.get("tensor")
    yield slot, index, tensor if isinstance(tensor, dict) else NULL
    for key in _P2P_KEYS:
        if (value := node.get(key)) is not None:
            yield slot, _inner(index, key), Leaf(type=type(value).__name__, value=value)


def leaf(node: Any, unknown: Unknown) -> Leaf:
    """A leaf decoded without a type to guide it; keys that are not known are counted.

    Raises:
        ValueError: it is none, or a shape, statistic or text in it is none.
    """
    if not isinstance(node, dict):
        raise ValueError(f"a tensor, scalar, list or object was expected, found {node!r:.40}")
    shape = node.get("shape")
    if shape is not None and not (
        isinstance(shape, list) and all(type(n) is int and 0 <= n < MAX_DIMENSION for n in shape)
    ):
        raise ValueError(f"shape {shape!r:.60} is no list of sizes")
    kind = node.get("type")
    if not isinstance(kind, str):
        raise ValueError(f"type is {kind!r:.40}, not a string")
    numbers = {key: number(node.get(key), key) for key in ("Max", "Min", "Mean", "Norm")}
    md5 = node.get("md5")
    place = _VALUES.get(kind, "value")
    value = node.get(place)
    if kind in FLOATS and isinstance(value, str):
        value = NONFINITE.get(value, value)
    others = {key: given for key, given in node.items() if key not in _KNOWN and key != place}
    if others:
        if value is None and node.get("dtype") is None:
            value = others  # of a type that is not known, all that is said of it
        else:
            unknown.keys.update(others.keys())
    exact = [node.get(key) for key in ("Max", "Min")]
    if any(type(n) is int and abs(n) >= EXACT_INTEGER for n in exact):
        value = {"Max": exact[0], "Min": exact[1]}
    grad = node.get("requires_grad")
    return Leaf(
        type=kind,
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
