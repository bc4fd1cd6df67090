"""One sample of a rollout: what names it, and its fields as leaves."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlprobe.dumps.rollouts.plain import Array, Foreign, Rows, Same
from rlprobe.errors import DumpError

#: Slots of a sample's records.
PROMPT, RESPONSE, FIELD = "prompt", "response", "field"
#: Made anew in every run, whatever is generated: they name requests, never samples.
OF_THE_RUN = frozenset({"uid", "request_id", "session_id", "step", "global_steps", "tags", "keys"})
#: Leaves of one sample; metadata that holds more is one text.
_MOST = 512
_MAX_DEPTH = 16


@dataclass(frozen=True)
class Leaf:
    """A value that is compared: a text, a number, ids, numbers of tokens, or what is not read."""

    slot: str
    #: The key in the file, those of nested values behind it.
    name: str
    value: str | int | float | bool | Array | Ids | Unread | None


@dataclass(frozen=True)
class Ids:
    """Whole numbers of which each is a name, as token ids are: equal or not, never near."""

    text: str


@dataclass(frozen=True)
class Unread:
    """A value that is not compared, and why."""

    why: str


@dataclass(frozen=True)
class Sample:
    """One row of a rollout."""

    #: Digests of its prompt and of its response.
    prompt: str
    response: str
    leaves: list[Leaf] = field(repr=False)


def build(
    fields: Mapping[str, Any], prompt: str, response: str, where: str, given: Mapping[str, Any]
) -> Sample:
    """A sample of plain values.

    Args:
        fields: by key in the file.
        prompt, response: the keys that name it.
        where: the file and row, for messages.
        given: what stands for the prompt and the response, by key, where that is not the field.

    Raises:
        DumpError: it has no such key.
    """
    for key in (prompt, response):
        if fields.get(key) is None and given.get(key) is None:
            raise DumpError(
                f"{where}: there is no {key!r}, which names a sample; found "
                f"{', '.join(map(str, fields)) or 'nothing'}"
            )
    leaves: list[Leaf] = []
    for key in (prompt, response, *sorted(k for k in fields if k not in (prompt, response))):
        slot = {prompt: PROMPT, response: RESPONSE}.get(key, FIELD)
        if key not in OF_THE_RUN and key in fields:
            leaves += _of_key(slot, key, fields[key])
    named = [_digest(given.get(key, fields.get(key))) for key in (prompt, response)]
    return Sample(named[0], named[1], leaves)


def _of_key(slot: str, key: str, value: Any) -> list[Leaf]:
    found = []
    for leaf in _leaves(slot, key, value, 0):
        found.append(leaf)
        if len(found) > _MOST:  # whole, as a text: more would not be looked at one by one
            return [Leaf(slot, key, json.dumps(_as_json(value), sort_keys=True, default=str))]
    return found


def _leaves(slot: str, name: str, value: Any, depth: int) -> Iterator[Leaf]:
    if isinstance(value, Same):
        value = value.value
    if depth > _MAX_DEPTH:
        yield Leaf(slot, name, Unread(f"it nests deeper than {_MAX_DEPTH} levels"))
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(slot, f"{name}.{key}", value[key], depth + 1)
    elif isinstance(value, Rows):
        yield from _leaves(slot, name, list(value.values), depth)
    elif isinstance(value, (list, tuple)):
        whole = _numbers(value)
        if whole is not None:
            yield from _leaves(slot, name, whole, depth)
        elif not value:
            yield Leaf(slot, name, "[]")
        else:
            for number, item in enumerate(value):
                yield from _leaves(slot, f"{name}.{number}", item, depth + 1)
    elif isinstance(value, Array):
        yield Leaf(slot, name, _array(value))
    elif isinstance(value, Foreign):
        yield Leaf(slot, name, Unread(f"an object of {value.name}, which is not loaded"))
    elif isinstance(value, (bytes, bytearray)):
        yield Leaf(slot, name, f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()}")
    else:
        yield Leaf(slot, name, value)


def _numbers(values: Any) -> Array | Ids | None:
    """A list of numbers as one array; NaN where there is None among them. None: it is no such."""
    if not values or not all(v is None or type(v) in (int, float) for v in values):
        return None
    if all(type(v) is int for v in values):
        return Ids(" ".join(map(str, values)))
    from rlprobe.dumps.tensors.dtypes import DTYPES

    try:
        numbers = [math.nan if v is None else float(v) for v in values]
    except OverflowError:
        return None
    if all(map(math.isnan, numbers)) and None in values:
        return None
    return Array(DTYPES["float64"], np.array(numbers))


def _array(value: Array) -> Any:
    one = value.item()
    if not isinstance(one, Array) or value.dtype.kind == "float" or value.dtype.numbers > 1:
        return one
    shape = "" if value.raw.ndim == 1 else f"{'x'.join(map(str, value.raw.shape))}: "
    return Ids(shape + " ".join(map(str, value.raw.reshape(-1).tolist())))


def _digest(value: Any) -> str:
    text = json.dumps(_as_json(value), sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _as_json(value: Any) -> Any:
    """The value as JSON has it, for digests and texts."""
    if isinstance(value, Array):
        return [value.dtype.name, list(value.raw.shape), value.raw.tobytes().hex()]
    if isinstance(value, Ids):
        return value.text
    if isinstance(value, Same):
        return _as_json(value.value)
    if isinstance(value, Foreign):
        return f"<{value.name}>"
    if isinstance(value, dict):
        return {str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    return value
