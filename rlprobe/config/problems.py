"""Turns pydantic's validation errors into messages for the person who wrote the file."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

#: pydantic's marks inside a location that are not keys of the file.
_UNION_MARKS = ("constrained-", "literal[", "tuple[", "function-", "json-or-python")
_QUOTES = " (put it in quotes)"
_KINDS = {
    "string_type": "text" + _QUOTES,
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
}


def describe(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per problem: key path, what was found, what is accepted."""
    lines: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        path, owner = _path(detail["loc"], model)
        line = _line(detail, path, owner)
        if detail["type"] == "extra_forbidden":
            line += _elsewhere(path, model)
        lines.setdefault(path, []).append(line)
    # A union's list branch is wrong at an item, its other branches at the whole: keep the item.
    inner = {path for path in lines if any(p.startswith((path + "[", path + ".")) for p in lines)}
    return [_merge(path, found) for path, found in lines.items() if path not in inner]


def _merge(path: str, found: list[str]) -> str:
    """The branches of a union each complain about one value: join what they accept."""
    unique = list(dict.fromkeys(found))
    if len(unique) == 1:
        return unique[0]
    head = unique[0].split("; accepted: ")[0]
    accepted = dict.fromkeys(
        line.split("; accepted: ", 1)[1].replace(_QUOTES, "")
        for line in unique
        if "; accepted: " in line
    )
    return f"{head}; accepted: {', or '.join(accepted)}"


def _path(loc: Sequence[int | str], model: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted key path of a location, and the model of the section that holds its last key."""
    path = ""
    owner: type[BaseModel] | None = model
    current: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        if part == "[key]" or part == "str" or part == "bool" or part.startswith(_UNION_MARKS):
            continue
        path += f".{part}" if path else part
        owner = current
        current = _section(current, part)
    return path, owner


def _section(model: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The model of a nested section, None where the key holds anything else."""
    field = model.model_fields.get(key) if model is not None else None
    if field is None:
        return None
    pending: list[Any] = [field.annotation]
    while pending:
        kind = pending.pop()
        origin = typing.get_origin(kind)
        # Python 3.10 takes list[str] for a type
        if origin is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        if origin in (typing.Union, types.UnionType, typing.Annotated):
            pending.extend(typing.get_args(kind))
    return None


def _line(detail: ErrorDetails, path: str, owner: type[BaseModel] | None) -> str:
    if detail["type"] == "value_error":
        return _of_section(path, str(detail["ctx"]["error"]))
    if detail["type"] == "extra_forbidden":
        keys = list(owner.model_fields) if owner is not None else []
        unknown = path.rpartition(".")[2]
        return f"{path}: no such key; accepted: {', '.join(keys)}{_hint(unknown, keys)}"
    if detail["type"] == "missing":
        return f"{path}: nothing found; this key must be given{_purpose(path, owner)}"
    found = detail["input"]
    return f"{path}: found {_shown(found)}; accepted: {_accepted(detail, path, owner)}"


#: What to do instead, of keys that people look for in a section that has them not.
_INSTEAD = {
    "framework": ": collect with a file for each framework, and give both runs to `rlprobe compare`"
}


def _elsewhere(path: str, model: type[BaseModel]) -> str:
    """Where a key belongs that the section has not, if another place of the file has it."""
    section, _, key = path.rpartition(".")
    if section and key in model.model_fields:
        return f"; {key} is of the whole file, the same for both sides{_INSTEAD.get(key, '')}"
    places = [
        f"{name}.{key}"
        for name in model.model_fields
        if (owner := _section(model, name)) is not None and key in owner.model_fields
    ]
    return f"; there is {' and '.join(places)}" if places and path not in places else ""


def _of_section(path: str, message: str) -> str:
    """A section's own check names its key first: "capture" + "task: …" is "capture.task: …"."""
    joint = "." if re.match(r"[a-z_]+: ", message) else ": "
    return f"{path}{joint}{message}" if path else message


def _accepted(detail: ErrorDetails, path: str, owner: type[BaseModel] | None) -> str:
    """What would have been accepted instead of what was found."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "too_short":
        return f"at least {context['min_length']} of them"
    if kind == "too_long":
        return f"at most {context['max_length']} of them"
    if kind == "literal_error":
        accepted = str(context["expected"]).replace("'", "")
        values = [v.strip() for v in accepted.replace(" or ", ",").split(",")]
        return f"{accepted}{_hint(detail['input'], values)}"
    if kind == "string_pattern_mismatch":
        return f"text matching {context['pattern']}{_purpose(path, owner)}"
    said = detail["msg"].replace("Input should be ", "").replace("Input should have ", "")
    return _KINDS.get(kind, said)


def _purpose(path: str, owner: type[BaseModel] | None) -> str:
    field = owner.model_fields.get(path.rpartition(".")[2]) if owner is not None else None
    if field is None or not field.description:
        return ""
    example = f" Example: {field.examples[0]!r}" if field.examples else ""
    return f" ({field.description}{example})"


def _shown(value: object) -> str:
    kind = {
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
        type(None): "nothing",
    }.get(type(value), type(value).__name__)
    text = "null" if value is None else repr(list(value) if isinstance(value, tuple) else value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({kind})"


def _hint(found: object, accepted: Sequence[str]) -> str:
    close = difflib.get_close_matches(str(found), accepted, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
