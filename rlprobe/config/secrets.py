"""Secrets have no place in an alignment: it is part of manifests, of bundles and of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlprobe import redaction

WAY = (
    "looks like a secret, and would be written to manifests, bundles and the page; take it out of "
    "the file and set it in the environment of the process that starts rlprobe, which runs inherit "
    "and nothing records (an option of verl's can be NAME=${oc.env:VARIABLE})"
)


def found(alignment: dict[str, Any]) -> str | None:
    """The key path of the first secret, None where there is none; its value is told to nobody."""
    return next(_differing(alignment, redaction.value(alignment), ""), None)


def _differing(before: Any, after: Any, path: str) -> Iterator[str]:
    if isinstance(before, dict):
        for key in before:
            yield from _differing(before[key], after[key], f"{path}.{key}" if path else str(key))
    elif isinstance(before, list):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differing(one, other, f"{path}[{number}]")
    elif before != after:
        yield path
