"""Imports of large packages, made as quick as they can be."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def hidden(*modules: str) -> Iterator[None]:
    """Let imports of these modules fail meanwhile, unless they are imported already.

    For packages that another looks for and that are not needed.
    """
    absent = [name for name in modules if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Import without looking for garbage: modules are none, and it takes a quarter of the time.

    What was imported is not looked at again either.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
