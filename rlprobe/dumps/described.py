"""Small documents of a run, checked to be what capture and commit write.

A run may come from elsewhere: its digests say that it is what somebody committed, and nothing of
what is in it.
"""

from __future__ import annotations

from typing import Any

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError

#: Parts of a process's environment that are mappings of their own.
_PARTS = ("versions", "variables", "kernels", "switches", "threads")
#: What a line of joined holds, and of which kind.
_OF_JOINED: dict[str, Any] = {
    "rank": int,
    "step": int,
    "parameters": int | None,
    "states": int | None,
    "rounded": list | None,
    "generators": str | None,
    "left": dict | None,
}
#: What it says of the weights that were there before.
_OF_LEFT: dict[str, Any] = {"compared": int, "moved": int, "names": list}


def environment(value: Any) -> dict[str, dict[str, Any]]:
    """Versions and settings by process, ``{role}-rank{R}``.

    Raises:
        DocumentError: it is no mapping of such.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, process in jsonfile.mapping(value).items():
        found[name] = jsonfile.mapping(process)
        for part in _PARTS:
            if not isinstance(process.get(part, {}), dict | None):
                raise DocumentError(f"{part} of {name} is no mapping")
    return found


def metrics(value: Any) -> dict[str, Any]:
    """A line of the trainer's metrics: step, trainer_step, metrics.

    Raises:
        DocumentError: it is none.
    """
    line = jsonfile.mapping(value)
    for key in ("step", "trainer_step"):
        if not isinstance(line.get(key), int | None) or isinstance(line.get(key), bool):
            raise DocumentError(f"its {key} is no whole number")
    jsonfile.mapping(line.get("metrics", {}))
    return line


def _lines(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DocumentError(f"{name} is no list")
    return [jsonfile.mapping(line) for line in value]


def joined(value: Any) -> list[dict[str, Any]]:
    """What each process loaded of another run's state: role, rank, step and how it went.

    Raises:
        DocumentError: it is none.
    """
    lines = _lines(value, "joined")
    for line in lines:
        if not isinstance(line.get("role"), str):
            raise DocumentError("a line of joined has no role")
        for key, kinds in _OF_JOINED.items():
            if not isinstance(line.get(key), kinds) or isinstance(line.get(key), bool):
                raise DocumentError(f"{key} of {line['role']} is not what a run writes")
        left = line.get("left") or {}
        if left and any(not isinstance(left.get(key), kind) for key, kind in _OF_LEFT.items()):
            raise DocumentError(f"left of {line['role']} is not what a run writes")
    return lines


def optimizers(value: Any) -> list[dict[str, Any]]:
    """What optimizers were told: step, stage, update, ranks, and groups of settings and names.

    Raises:
        DocumentError: it is none.
    """
    lines = _lines(value, "optimizers")
    for line in lines:
        match line:
            case {
                "step": int(),
                "stage": str(),
                "update": int(),
                "ranks": list() as ranks,
                "groups": list() as groups,
            } if all(isinstance(rank, int) for rank in ranks):
                for group in groups:
                    _group(group)
            case _:
                raise DocumentError(
                    "a line of optimizers has no step, stage, update, ranks and groups"
                )
    return lines


def buffers(value: Any) -> list[dict[str, Any]]:
    """What models kept beside their parameters: step, stage, role, ranks, and each buffer's name,
    dtype, shape, digest, norm, sketch, and whether its numbers are the Hugging Face model's.

    Raises:
        DocumentError: it is none.
    """
    lines = _lines(value, "buffers")
    for line in lines:
        match line:
            case {
                "step": int(),
                "stage": str(),
                "role": str(),
                "ranks": list() as ranks,
                "buffers": list() as kept,
            } if all(isinstance(rank, int) for rank in ranks):
                for buffer in kept:
                    _buffer(buffer)
            case _:
                raise DocumentError("a line of buffers has no step, stage, role, ranks and buffers")
    return lines


def _buffer(value: Any) -> None:
    match value:
        case {
            "name": str(),
            "dtype": str(),
            "shape": list() as shape,
            "digest": str(),
            "norm": float() | int() | None,
            "sketch": list() | None as sketch,
            "logical": bool(),
        } if all(isinstance(size, int) for size in shape) and all(
            isinstance(number, (int, float)) for number in sketch or ()
        ):
            return
    raise DocumentError("a buffer has no name, dtype, shape, digest, norm and sketch")


def _group(value: Any) -> None:
    match value:
        case {"settings": dict(), "names": list() as names} if all(
            isinstance(name, str) for name in names
        ):
            return
    raise DocumentError("a group of an optimizer has no settings and names")
