"""The digest that a document carries of all that it says, so that every change of it shows.

It stands beside the rest, under :data:`KEY`. Readers that do not know it pass it over, and what
was made without one (by hand, or by an earlier version) is still read: nothing is known of changes
in that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from rlprobe.errors import DumpError

KEY = "digest"
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def sealed(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a document says, with its digest."""
    rest = _rest(said)
    return {**rest, KEY: _digest(rest)}


def holds(said: Mapping[str, Any]) -> bool:
    """Whether a document carries the digest of what it says."""
    return said.get(KEY) == _digest(_rest(said))


def check(said: Mapping[str, Any], known: Collection[str], where: str, again: str) -> bool:
    """Whether a document is known to be what was written.

    Args:
        said: all of it.
        known: its keys; a digest under another is one whose own key was damaged.
        where: the file, for messages.
        again: what to do about one that is not, for messages.

    Returns:
        False where it carries no digest.

    Raises:
        DumpError: it is not what was written.
    """
    if KEY in said:
        if holds(said):
            return True
        raise DumpError(f"{where} is not what was written: it was changed or damaged; {again}")
    odd = [key for key in said if key not in known and _is_digest(said[key])]
    if odd:
        raise DumpError(
            f"{where} has its digest under the key {odd[0][:40]!r}: it was changed or damaged; "
            f"{again}"
        )
    return False


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _rest(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name != KEY}


def _digest(said: Mapping[str, Any]) -> str:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
