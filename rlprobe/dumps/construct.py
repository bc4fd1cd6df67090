"""Which call another call was made in: msprobe's construct.json, beside dump.json.

msprobe (26.2, levels L0 and mix; with L1 the file is empty) writes ``{call: around}``: the call of
a module that was running when this one, of a module or a function, began; null where none was. With
Megatron it is ``[around, micro-step]``, and one key is no call but the number of micro-steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from rlprobe.errors import DumpError

NAME = "construct.json"
_MAX_BYTES = 1 << 30
#: Calls around a call that are looked at: deeper than any model nests.
_DEPTH = 64


def read(path: Path) -> dict[str, str | None]:
    """The call around each call, None where msprobe saw none; empty without the file.

    Raises:
        DumpError: the file is too large, or not of that form.
    """
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DumpError(f"{path} is larger than {_MAX_BYTES} bytes")
        table = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        return {call: said[0] for call, raw in table.items() if (said := _around(raw))}
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not an msprobe construct file: {error}") from error


def _around(raw: msgspec.Raw) -> list[str | None]:
    """The call around one; nothing where the value is of another form, and says nothing."""
    begins = bytes(raw)[:1]
    if begins == b"[":
        inside = msgspec.json.decode(raw, type=list[msgspec.Raw])
        raw = inside[0] if inside else raw
        begins = bytes(raw)[:1]
    if begins == b"n":
        return [None]
    return [msgspec.json.decode(raw, type=str)] if begins == b'"' else []


def around(told: Mapping[str, str | None], call: str) -> list[str]:
    """The calls around one, the innermost first; what goes round in circles is cut."""
    found: list[str] = []
    inner: str | None = call
    while len(found) < _DEPTH and (inner := told.get(inner or "")) and inner not in found:
        found.append(inner)
    return found
