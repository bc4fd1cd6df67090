"""The canonical form of dump files: what would make equal numbers differ is taken out.

Taken out are facts about where and when a dump was written: ``dump_data_dir``, the directory
``proc{pid}``, and the absolute beginnings of paths in stacks. They are returned, so that the
manifest keeps them beside. Texts are edited, not written anew: dump.json is not strict JSON, may be
large, and its numbers must keep every digit. msprobe's tools read the result as they read the
original: without ``dump_data_dir`` they look for ``dump_tensor_data`` beside the file.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from typing import Any

from rlprobe.errors import DumpError

_DUMP_DATA_DIR = "dump_data_dir"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()

#: A frame of a stack as JSON text: ``"File /a/b.py, line 3, in f, …``. The quote is the string's
#: own, not one inside a line of source.
_FRAME = re.compile(r'(?<!\\)"File (/(?:[^"\\]|\\.)*?), line \d')
#: Directories whose place differs from machine to machine, with the name they get.
_KNOWN = (
    (re.compile(r"(.*/(?:site|dist)-packages)/"), "site-packages"),
    # Ray unpacks a job's own code below its session directory, which has a timestamp in its name.
    (re.compile(r"(.*/(?:working_dir_files|py_modules_files)/[^/]+)/"), "working-dir"),
    (re.compile(r"(.*/lib/python3\.\d+)/"), "python"),
)

_STEP = re.compile(r"step\d+")
_PROC = re.compile(r"proc\d+")


def dump_json(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """A dump.json or debug.json without ``dump_data_dir``, and what was taken out.

    Raises:
        DumpError: the text is not an object, or has the key in another form than msprobe writes.
    """
    removed: dict[str, Any] = {}
    # Counting first: the value of "data" may be some hundred MB and is not parsed when the key
    # stands before it, as both engines write it.
    left = text.count(f'"{_DUMP_DATA_DIR}"')
    try:
        at = _expect(text, _skip(text, 0), "{")
        while left:
            start = at
            if text[at] == "}":
                break
            key, at = _DECODER.raw_decode(text, at)
            if not isinstance(key, str):
                raise ValueError(f"a key at {start} is no text")
            at = _skip(text, _expect(text, _skip(text, at), ":"))
            value, at = _DECODER.raw_decode(text, at)
            at = _skip(text, at)
            comma = text[at] == ","
            if comma:
                at = _skip(text, at + 1)
            if key == _DUMP_DATA_DIR:
                if key in removed or not isinstance(value, (str, type(None))):
                    raise DumpError(f"{where}: {_DUMP_DATA_DIR} is given twice, or is no text")
                removed[key] = value
                text = _cut(text, start, at, followed=comma)
                at = start
                left -= 1
            if not comma:
                break
    except (ValueError, IndexError, RecursionError) as error:
        raise DumpError(f"{where} is not a JSON object ({error})") from error
    return text, removed


def stack_json(text: str) -> tuple[str, dict[str, str]]:
    """A stack.json with the beginnings of its paths replaced, and what stood in their place.

    Directories of packages and of Python become ``<site-packages>`` and ``<python>``; what lies
    elsewhere loses the directories its files have in common, per top-level directory, as
    ``<path-1>``, ``<path-2>`` in order of appearance.
    """
    names = _placeholders(dict.fromkeys(match.group(1) for match in _FRAME.finditer(text)))

    def shortened(match: re.Match[str]) -> str:
        path = match.group(1)
        return match.group(0).replace(path, names[path], 1) if path in names else match.group(0)

    replaced = {}
    for path, short in names.items():
        placeholder, _, tail = short.partition("/")
        replaced[placeholder] = path[: -len(tail) - 1]
    return _FRAME.sub(shortened, text), replaced


def dump_path(path: str) -> str:
    """A file's path below the dump with ``step{N}/proc{pid}`` made ``step{N}/rank0``.

    One process without a process group is rank 0 (the caller refuses two of them).
    """
    parts = path.split("/")
    for i in range(1, len(parts) - 1):
        if _PROC.fullmatch(parts[i]) and _STEP.fullmatch(parts[i - 1]):
            parts[i] = "rank0"
    return "/".join(parts)


def _expect(text: str, at: int, character: str) -> int:
    if text[at] != character:
        raise ValueError(f"expected {character!r} at {at}")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _cut(text: str, start: int, end: int, *, followed: bool) -> str:
    if followed:
        return text[:start] + text[end:]
    # The last member: the comma before it goes as well.
    return text[:start].rstrip(" \t\r\n").removesuffix(",") + text[end:]


def _placeholders(paths: Iterable[str]) -> dict[str, str]:
    """The short form of each path that has one."""
    numbers: dict[str, dict[str, str]] = {}
    short: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    for path in paths:
        known = next(((p.match(path), name) for p, name in _KNOWN if p.match(path)), None)
        if known is None or known[0] is None:
            others.setdefault(path.split("/")[1], []).append(path)
            continue
        prefix = known[0].group(1)
        of_kind = numbers.setdefault(known[1], {})
        suffix = "" if prefix in of_kind or not of_kind else f"-{len(of_kind) + 1}"
        placeholder = of_kind.setdefault(prefix, f"<{known[1]}{suffix}>")
        short[path] = placeholder + path[len(prefix) :]
    for number, group in enumerate(others.values(), 1):
        prefix = posixpath.commonpath([posixpath.dirname(path) for path in group])
        if prefix != "/":
            for path in group:
                short[path] = f"<path-{number}>" + path[len(prefix) :]
    return short
