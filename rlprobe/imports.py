"""Imports of large packages, made as quick as they can be."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


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


def postpone(*modules: str) -> None:
    """Have these modules read once something of them is asked for, not when they are imported.

    For modules of the standard library that a large package imports and seldom uses. Not
    :class:`importlib.util.LazyLoader`, whose modules are read when they are imported twice.

    Args:
        modules: names of submodules, as ``importlib.metadata``.
    """
    for name in modules:
        if name not in sys.modules:
            parent, _, own = name.rpartition(".")
            sys.modules[name] = later = _Later(name)
            # as the import system does once a submodule is read
            setattr(importlib.import_module(parent), own, later)


class _Later(ModuleType):
    """Stands for a module that has not been read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by the import system itself
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


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
