"""Loops that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[_F], _F]:
    """njit with a cache on disk where there is a writable place for one."""
    base = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: _F) -> _F:
        try:
            found: Any = njit(cache=True, **base)(function)
        except RuntimeError:  # a read-only installation without a home directory
            found = njit(**base)(function)
        return found  # type: ignore[no-any-return]

    return decorate
