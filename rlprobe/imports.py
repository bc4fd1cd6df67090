"""Imports: of large packages as quick as they can be, of lacking ones named."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

#: Module -> the distribution that it is of, and the extra of this package's that brings it.
_BROUGHT = {
    "h5py": ("h5py", ""),
    "msgspec": ("msgspec", ""),
    "numpy": ("numpy", ""),
    "polars": ("polars", ""),
    "pydantic": ("pydantic", ""),
    "yaml": ("PyYAML", ""),
    "numba": ("numba", "compare"),
    "jinja2": ("Jinja2", "report"),
    "openpyxl": ("openpyxl", "report"),
    "snakemake": ("snakemake", "workflow"),
    "msprobe": ("mindstudio-probe", "msprobe"),
}


def lacking(error: ModuleNotFoundError) -> str | None:
    """What to do about a package of ours that this environment lacks; None: it is none of ours."""
    found = _BROUGHT.get((error.name or "").partition(".")[0])
    if found is None:
        return None
    distribution, extra = found
    wanted = f"'.[{extra}]'" if extra else "."
    return (
        f"this needs {distribution}, which {sys.executable} does not have: install it there, or "
        f"all that is needed with `pip install {wanted}` in rlprobe's directory (in a vendor's "
        "image with `-c` and a list of what it has: docs/npu-box.md)"
    )


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
