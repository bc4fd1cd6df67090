"""Some rows of one reading of a tensor, as instructions on vectors of columns.

Loops of numba's would have four rows at a time and keep every column's sums in memory in between:
half of the work is loading and storing those. Written as LLVM's vectors, sums of sixteen rows stay
in registers. Sixteen rows side by side are no stream which a processor would read ahead of: the
next sixteen are asked for while these are read.

Nothing is reassociated or contracted: the bits are those of
:mod:`rlprobe.capture.light.onepass`'s definition.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rlprobe.sketch import K

#: As in the definition.
_WIDTH, _RUN = 8 * K, 16
#: Columns of a vector, and of the last one: a row has thirty of the one and one of the other.
_WIDE, _REST = 16, _WIDTH % 16
#: Bytes of a cache line; how many lines of the rows to come are asked for beside each vector.
_LINE = 64
_LINES = _RUN * _WIDE * 4 // _LINE

_F32, _F64 = ir.FloatType(), ir.DoubleType()
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES = _I8.as_pointer()


class _Code:
    """Writes the instructions of one use of :func:`_adding`.

    Args:
        builder: where they go.
        rows: how many rows are read.
        parts: addresses of the rows, one or several that are added up first.
        signs: address of the rows' signs; None: no sketch.
        columns: fp32 of five rows: largest, smallest, sum, sum of squares, sketch.
        wide: fp64 of three rows: sum, sum of squares, sketch.
    """

    def __init__(
        self, builder: Any, rows: int, parts: list[Any], signs: Any, columns: Any, wide: Any
    ) -> None:
        self._builder = builder
        self._rows = rows
        self._parts = [builder.inttoptr(part, _F32.as_pointer()) for part in parts]
        self._signs = None if signs is None else builder.inttoptr(signs, _BYTES)
        sums = 2 if signs is None else 3
        self._columns = [self._row(columns, row) for row in range(2 + sums)]
        self._wide = [self._row(wide, row) for row in range(sums)]

    def _row(self, array: Any, row: int) -> Any:
        return self._builder.gep(array, [_number(row * _WIDTH)])

    def _load(self, array: Any, at: Any, kind: Any, align: int) -> Any:
        place = self._builder.bitcast(self._builder.gep(array, [at]), kind.as_pointer())
        return self._builder.load(place, align=align)

    def _store(self, value: Any, array: Any, at: Any, align: int) -> None:
        place = self._builder.bitcast(self._builder.gep(array, [at]), value.type.as_pointer())
        self._builder.store(value, place, align=align)

    def _value(self, at: Any, kind: Any) -> Any:
        """Numbers of one row: the first of the parts, and the others added to it in turn."""
        found = [self._load(part, at, kind, 4) for part in self._parts]
        total = found[0]
        for other in found[1:]:
            total = self._builder.fadd(total, other)
        return total

    def read(self, column: Any, size: int) -> None:
        """All rows of ``size`` columns from ``column`` on."""
        builder = self._builder
        kind = ir.VectorType(_F32, size)
        high, low, *held = [self._load(row, column, kind, 4) for row in self._columns]
        whole = self._rows == _RUN
        if whole:  # a run of its own
            held = [ir.Constant(kind, [0.0] * size) for _ in held]
        for row in range(self._rows):
            at = builder.add(column, _number(row * _WIDTH))
            value = self._value(at, kind)
            high = builder.select(builder.fcmp_ordered(">", value, high), value, high)
            low = builder.select(builder.fcmp_ordered("<", value, low), value, low)
            terms = [value, builder.fmul(value, value)]
            if self._signs is not None:
                signs = self._load(self._signs, at, ir.VectorType(_I8, size), 1)
                terms.append(builder.fmul(value, builder.sitofp(signs, kind)))
            held = [builder.fadd(sum_of, term) for sum_of, term in zip(held, terms, strict=True)]
        for found, array in zip((high, low), self._columns, strict=False):
            self._store(found, array, column, 4)
        if not whole:
            for found, array in zip(held, self._columns[2:], strict=True):
                self._store(found, array, column, 4)
            return
        doubled = ir.VectorType(_F64, size)
        for found, array in zip(held, self._wide, strict=True):
            before = self._load(array, column, doubled, 8)
            self._store(builder.fadd(before, builder.fpext(found, doubled)), array, column, 8)

    def ask(self, start: Any, left: Any, at: Any) -> None:
        """Ask for a vector's share of the rows to come, unless they end before it."""
        builder = self._builder
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch")
        with builder.if_then(builder.icmp_signed("<", at, left)):
            first = builder.inttoptr(builder.add(start, at), _BYTES)
            for line in range(_LINES):
                # to read (0), to be kept in the second cache (2), since two runs fill the first
                options = [ir.Constant(_I32, number) for number in (0, 2, 1)]
                builder.call(function, [builder.gep(first, [_number(line * _LINE)]), *options])


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _adding(rows: int, signed: bool) -> Any:
    """Adds so many rows to the columns: a whole run to the fp64 sums, less to the fp32 ones."""

    @intrinsic
    def add(
        _: Any, address: Any, signs: Any, columns: Any, wide: Any, ahead: Any, left: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            address, signs, columns, wide, ahead, left = arguments
            columns = context.make_array(signature.args[2])(context, builder, columns).data
            wide = context.make_array(signature.args[3])(context, builder, wide).data
            own = _Code(builder, rows, [address], signs if signed else None, columns, wide)
            with cgutils.for_range(builder, _number(_WIDTH // _WIDE)) as loop:
                if rows == _RUN:
                    share = _number(_LINES * _LINE)
                    own.ask(ahead, left, builder.mul(loop.index, share))
                own.read(builder.mul(loop.index, _number(_WIDE)), _WIDE)
            own.read(_number(_WIDTH - _REST), _REST)
            return context.get_dummy_value()

        number = types.int64
        return types.void(number, number, columns, wide, number, number), code

    return add


#: ``(address of the rows, of their signs, columns, wide, address of the rows to come, bytes of
#: them)``; see :class:`_Code`. Without signs that address is not looked at.
run, run_signed = _adding(_RUN, False), _adding(_RUN, True)
four, four_signed = _adding(4, False), _adding(4, True)
one, one_signed = _adding(1, False), _adding(1, True)
