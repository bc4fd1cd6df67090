"""Secrets have no place in an alignment: it is part of manifests, of bundles and of the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlprobe import redaction

_WAY = (
    "would be written to manifests, bundles and the page; take {it} out of the file and set {it} "
    "in the environment of the process that starts rlprobe, which runs inherit and nothing records "
    "(an option of verl's can be NAME=${{oc.env:VARIABLE}})"
)


def sentence(places: Sequence[str]) -> str:
    """What is wrong with these key paths, and what to do about it."""
    one = len(places) == 1
    what = "looks like a secret, and" if one else "look like secrets, and"
    return f"{', '.join(places)}: {what} {_WAY.format(it='it' if one else 'them')}"


def found(alignment: dict[str, Any]) -> list[str]:
    """The key paths of all secrets; their values are told to nobody."""
    return list(_differing(alignment, redaction.value(alignment), ""))


def _differing(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict):
        for key in before:
            yield from _differing(before[key], after[key], f"{path}.{key}" if path else str(key))
    elif isinstance(before, list):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differing(one, other, f"{path}[{number}]")
    elif before != after:
        yield path
