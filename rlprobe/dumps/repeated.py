"""Keys that stand twice in a dump file, of which JSON readers keep the last without a word."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

#: Files up to this size are searched at every depth; of larger ones, the names of entries.
THOROUGH = 1 << 20
_MOST = 20

_DATA = re.compile(rb'"data"\s*:\s*\{')
_COLON = re.compile(rb"\s*:\s*")
_SEPARATOR = re.compile(rb'\s*,\s*"')
_END = re.compile(rb"\s*\}")


def keys(text: bytearray, entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    """In which entry, and what of it stands twice; empty where nothing does.

    Args:
        text: the whole file, strict JSON.
        entries: its ``data``, the values still raw.
    """
    if len(text) > THOROUGH and _accounted(text, entries):
        return []
    return searched(text)


def _accounted(text: bytearray, entries: Mapping[str, Any]) -> bool:
    """Whether names, values and what is between them make up the whole of ``data``.

    What stands between two entries is taken to be of one length, as a program writes it: an entry
    that was dropped for a later one of the same name leaves bytes over.
    """
    start = _DATA.search(text)
    if start is None or len(entries) < 2:
        return False
    lengths = [memoryview(raw).nbytes for raw in entries.values()]
    first = next(iter(entries))
    name_at = text.find(b'"', start.end())
    colon = _COLON.match(text, name_at + len(first) + 2)
    if colon is None:
        return False
    separator = _SEPARATOR.match(text, colon.end() + lengths[0])
    if separator is None:
        return False
    between = len(separator[0]) - 1
    each = 2 + len(colon[0])
    names = sum(map(len, entries))
    end = name_at + names + sum(lengths) + len(entries) * each + (len(entries) - 1) * between
    return _END.match(text, end) is not None


def searched(text: bytearray) -> list[tuple[str, str]]:
    """The same by parsing everything again."""
    found: list[str] = []

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            found.extend(twice)
            made[_MARK] = twice
        return made

    try:
        whole = json.loads(text, object_pairs_hook=checked)
    except (ValueError, RecursionError):
        return []
    if not found or not isinstance(whole, dict):
        return []
    return _named(whole)[:_MOST]


_MARK = "\x00twice"


def _named(whole: dict[str, Any]) -> list[tuple[str, str]]:
    named = [
        ("file", f"key {key!r:.80} stands twice in the file; the last is read")
        for key in whole.get(_MARK, ())
    ]
    data = whole.get("data")
    if not isinstance(data, dict):
        return named
    named += [
        (name, "the file has this entry twice; the last is read") for name in data.get(_MARK, ())
    ]
    for name, entry in data.items():
        if name != _MARK:
            named += [
                (name, f"key {key!r:.80} stands twice in it; the last is read")
                for key in _inside(entry, 0)
            ]
    return named


def _inside(node: Any, depth: int) -> list[str]:
    if depth > 400:
        return []
    if isinstance(node, list):
        return [key for child in node for key in _inside(child, depth + 1)]
    if not isinstance(node, dict):
        return []
    own = list(node.get(_MARK, ()))
    return own + [
        key for name, child in node.items() if name != _MARK for key in _inside(child, depth + 1)
    ]
