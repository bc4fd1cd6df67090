"""Writing files so that a reader sees all of one or nothing of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlprobe.files import written


def write_text(path: Path, parts: Iterable[str]) -> int:
    """Write ``parts`` beside ``path`` and rename; returns the size in bytes."""
    with written(path) as temporary:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.writelines(parts)
        return temporary.stat().st_size


def write_json(path: Path, value: Any, indent: int | None = None) -> int:
    """:func:`write_text` of a JSON document; NaN and Infinity stand bare, as in msprobe's."""
    return write_text(path, [json.dumps(value, indent=indent)])


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line in a single write, so that lines of two processes never mix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(value) + "\n").encode("utf-8")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """:func:`append_line` for several documents at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(value) + "\n" for value in values).encode("utf-8")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        view = memoryview(text)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
