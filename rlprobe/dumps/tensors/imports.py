"""Keeping packages out of another's imports, where they are looked for and not needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Let imports of these modules fail meanwhile, unless they are imported already."""
    absent = [name for name in modules if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
