"""Reads JSON within limits. Standard library only: it is used at interpreter start."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any, NoReturn

from rlprobe.documents.limits import (
    MAX_DEPTH,
    MAX_DIGITS,
    DocumentError,
    check_characters,
    decoded,
    read_bytes,
)

#: Largest configuration, result or proof that is read; what may be larger has a limit of its own.
MAX_BYTES = 64 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def load(
    path: str | os.PathLike[str],
    *,
    most: int = MAX_BYTES,
    nonfinite: bool = False,
    depth: int = MAX_DEPTH,
) -> Any:
    """The value in a JSON file; arguments as :func:`parse`'s.

    Raises:
        DocumentError: unreadable, larger than ``most`` bytes, or :func:`parse` refuses it.
    """
    return parse(read_bytes(path, most), nonfinite=nonfinite, depth=depth)


def parse(
    data: bytes | str,
    *,
    nonfinite: bool = False,
    depth: int = MAX_DEPTH,
    any_text: bool = False,
    repeated: list[str] | None = None,
) -> Any:
    """The value that a JSON text stands for.

    Args:
        data: the text, or its UTF-8 bytes.
        nonfinite: accept bare NaN and Infinity, which JSON lacks and Python writes.
        depth: levels of lists and mappings that are accepted.
        any_text: accept texts that no file can hold as they are, for what a model has written.
        repeated: gets the keys that stand twice in one mapping, of which the last counts.

    Raises:
        DocumentError: not JSON, nested too deeply, a number too long, or a text that is none.
    """
    text = data if isinstance(data, str) else decoded(data)
    try:
        value = json.loads(
            text,
            parse_int=_whole,
            parse_constant=_CONSTANTS.__getitem__ if nonfinite else _refused,
            object_pairs_hook=None if repeated is None else _noting(repeated),
        )
    except json.JSONDecodeError as error:
        raise DocumentError(
            f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from error
    except RecursionError as error:
        raise DocumentError(f"nests deeper than {depth} levels") from error
    _check(value, depth, texts=not any_text and _SURROGATE.search(text) is not None)
    return value


def mapping(value: Any) -> dict[str, Any]:
    """``value`` where it is a mapping.

    Raises:
        DocumentError: it is anything else.
    """
    if not isinstance(value, dict):
        raise DocumentError(f"found {_name(value)}; accepted: a mapping in braces")
    return value


def _name(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _noting(repeated: list[str]) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def whole(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            repeated.append(next(name for name in names if names.count(name) > 1))
        return found

    return whole


_CONSTANTS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _refused(constant: str) -> NoReturn:
    raise DocumentError(f"{constant} is no JSON number; accepted: finite numbers or null")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise DocumentError(
            f"a whole number has {len(digits)} digits, {digits[:8]}…; accepted: {MAX_DIGITS}"
        )
    return int(digits)


def _check(value: Any, depth: int, texts: bool) -> None:
    """Depth of everything and, only where an escape could have made a wrong one, every text."""
    level = [value]
    for _ in range(depth + 1):
        below: list[Any] = []
        for node in level:
            if node.__class__ is dict:
                below += node.values()
                if texts:
                    below += node
            elif node.__class__ is list:
                below += node
            elif texts and node.__class__ is str:
                check_characters(node)
        level = below if texts else [n for n in below if n.__class__ in (dict, list)]
        if not level:
            return
    raise DocumentError(f"nests deeper than {depth} levels")
