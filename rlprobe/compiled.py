"""Loops that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I32 = ir.IntType(32)
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
def prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Ask for an element's cache line, which will be read soon; beyond the end it does nothing."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        line = builder.bitcast(builder.gep(made.data, [arguments[1]]), _BYTES)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
        # to read (0), to be kept in all caches (3), of data (1)
        builder.call(function, [line, *(ir.Constant(_I32, number) for number in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, index), code


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_context: Any, address: Any) -> Any:
    """A number as an address in memory, for ``numba.carray``."""

    def code(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTES)

    return types.voidptr(address), code
