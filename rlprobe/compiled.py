"""Loops that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_BYTES = ir.IntType(8).as_pointer()
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


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_context: Any, address: Any) -> Any:
    """A number as an address in memory, for ``numba.carray``."""

    def code(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(address), code
