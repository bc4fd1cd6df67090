"""Texts from runs, made fit for a page: nothing that a browser would hide or reorder by."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from rlprobe import redaction


def printable(value: Any) -> Any:
    """Control characters of decoded text or hostile names never reach the page."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in redaction.text(str(value))
    )
