"""How far two tensors are apart, elementwise, in one pass over both.

The numbers are msprobe's where msprobe has them (cosine, Euclidean distance, largest absolute and
relative error, shares below 1e-3 and 5e-3: relative to the benchmark, in float32 for types of up to
32 bits, a zero benchmark counted as the type's epsilon), and besides: relative L2 error, where the
largest error is, the distance in representable values, elements at the type's limit, and values
that are not finite on one side only. Those equal on both sides (sign included) are left out of the
sums, as msprobe leaves them out whatever their sign.

Tensors of equal bytes are not computed with. Where the squares of float64 values leave its range,
where integers have more than 53 bits, and for complex numbers, :mod:`.careful` takes the sums.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rlprobe.compare.tensors import arithmetic, careful
from rlprobe.compare.tensors.figures import Distance, cosine_of
from rlprobe.dumps.tensors.dtypes import Array, DType, keys, numbers
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError

#: Elements per block: 1 MiB of float32 a side.
BLOCK = 1 << 18
#: Sums of squares below this lost digits, and integers whose squares sum to less are exact.
_SMALL, _EXACT = 1e-280, 2.0**106


def distance(benchmark: TensorFile, target: TensorFile) -> Distance:
    """Compare two tensors of equal size, element by element in row-major order.

    Raises:
        TensorFileError: their sizes differ, or only one has several numbers an element.
    """
    if benchmark.size != target.size:
        raise TensorFileError(f"{benchmark.size} elements against {target.size}")
    if benchmark.dtype.numbers != target.dtype.numbers:
        raise TensorFileError(f"{benchmark.dtype.name} against {target.dtype.name}")
    if benchmark.dtype == target.dtype and _same_bytes(benchmark, target):
        return _of_equal(benchmark)
    if benchmark.dtype.kind == "complex":
        return careful.of_complex(benchmark, target, _pairs)
    state = _Accumulator(benchmark.dtype, target.dtype)
    for raw_b, raw_t in _pairs(benchmark, target):
        state.add(raw_b, raw_t)
    found = state.result()
    if not state.doubtful:
        return found
    sums = careful.sums(_pairs(benchmark, target), benchmark.dtype, target.dtype)
    exact = sums.finished(_pairs(benchmark, target))
    return replace(
        found,
        euclidean=exact.euclidean,
        error=exact.error,
        cosine=exact.cosine,
        max_abs_err=exact.max_abs_err,
        max_abs_index=exact.max_abs_index,
        max_rel_err=_share(found.max_rel_err, exact.max_rel_err),
    )


def _share(found: float, exact: float) -> float:
    """The largest relative error: a difference of float64 may overflow where its share does not."""
    return exact if math.isinf(found) and exact < sys.float_info.max else max(found, exact)


def _same_bytes(benchmark: TensorFile, target: TensorFile) -> bool:
    return all(bool((_bits(b) == _bits(t)).all()) for b, t in _pairs(benchmark, target))


def _bits(raw: Array) -> Any:
    raw = np.ascontiguousarray(raw)
    width = raw.itemsize if raw.itemsize in (1, 2, 4) else 8
    return raw.view(np.dtype(f"<u{width}"))


def _of_equal(tensor: TensorFile) -> Distance:
    """Both sides are this tensor; only what is not finite has to be looked for."""
    nonfinite = 0
    if tensor.dtype.kind != "int":
        for raw in _rechunked(tensor):
            finite: Any = np.isfinite(numbers(raw, tensor.dtype, not tensor.dtype.narrow))
            if tensor.dtype.kind == "complex":
                finite = finite.reshape(-1, 2).all(axis=1)
            nonfinite += finite.size - int(np.count_nonzero(finite))
    return Distance(
        size=tensor.size,
        identical=True,
        euclidean=0.0,
        error=0.0,
        cosine=1.0,
        max_abs_err=0.0,
        max_abs_index=None,
        max_rel_err=0.0,
        ulp_max=None if tensor.dtype.kind == "complex" else 0.0,
        within_1e3=1.0,
        within_5e3=1.0,
        saturated=0,
        nonfinite_benchmark=nonfinite,
        nonfinite_target=nonfinite,
        nonfinite_same=nonfinite,
    )


def _pairs(benchmark: TensorFile, target: TensorFile) -> Iterator[tuple[Array, Array]]:
    """Blocks of both, of equal length."""
    return zip(_rechunked(benchmark), _rechunked(target), strict=True)


def _rechunked(tensor: TensorFile) -> Iterator[Array]:
    """Blocks of :data:`BLOCK` elements; a strided tensor's own blocks would be uneven."""
    if tensor.contiguous:
        yield from tensor.blocks(BLOCK)
        return
    held: list[Array] = []
    count = 0
    for block in tensor.blocks(BLOCK):
        held.append(block)
        count += len(block)
        while count >= BLOCK:
            joined = np.concatenate(held)
            yield joined[:BLOCK]
            held, count = [joined[BLOCK:]], count - BLOCK
    if count:
        yield np.concatenate(held)


class _Accumulator:
    def __init__(self, benchmark: DType, target: DType) -> None:
        self.wide = not (benchmark.narrow and target.narrow)
        self.benchmark, self.target = benchmark, target
        self.arithmetic = arithmetic.chosen(self.wide)
        self.state = np.zeros(6)
        self.where = np.array([-1, 0, 0], np.int64)
        self.size = 0
        self.steps = 0.0 if benchmark == target else math.nan
        self.saturated = 0
        self.nonfinite = [0, 0, 0]
        self.doubtful = False

    def add(self, raw_b: Array, raw_t: Array) -> None:
        b, t = (
            numbers(raw, dtype, self.wide)
            for raw, dtype in ((raw_b, self.benchmark), (raw_t, self.target))
        )
        before = self.state.copy(), self.where.copy()
        bad: Array | None = None
        self.arithmetic.add(b, t, self.size, self.state, self.where)
        if not np.isfinite(self.state[:5]).all():
            # Rare: something is not finite, or its square is not. Redo the block without it.
            self.state, self.where = before
            bad = self._add_nonfinite(b, t)
        self.size += len(b)
        if self.steps == self.steps:
            self.steps = max(self.steps, self._steps(raw_b, raw_t, bad))
        self._saturation(b, t)

    def _add_nonfinite(self, b: Any, t: Any) -> Array:
        bad_b, bad_t = ~np.isfinite(b), ~np.isfinite(t)
        same = bad_b & bad_t & ((b == t) | (np.isnan(b) & np.isnan(t)))
        bad: Any = bad_b | bad_t
        for place, mask in enumerate((bad_b, bad_t, same)):
            self.nonfinite[place] += int(np.count_nonzero(mask))
        clean_b = np.where(bad, 0, b).astype(b.dtype)
        clean_t = np.where(bad, 0, t).astype(t.dtype)
        sums = self.state[:5].copy()
        self.arithmetic.add(clean_b, clean_t, self.size, self.state, self.where)
        if not np.isfinite(self.state[:5]).all():
            # float64 values beyond 1e154: their squares are taken apart, for all blocks
            self.state[:5] = sums
            self.doubtful = True
        # elements that are not finite on one side only are not close to anything
        self.where[1:] -= int(np.count_nonzero(bad & ~same))
        found: Array = bad
        return found

    def _steps(self, raw_b: Array, raw_t: Array, bad: Array | None) -> float:
        b: Any
        t: Any
        b, t = keys(raw_b, self.benchmark), keys(raw_t, self.target)
        if bad is not None and bad.any():
            b, t = (np.where(bad, side.dtype.type(0), side) for side in (b, t))
        if self.benchmark.kind == "int":
            return float(self.arithmetic.steps_integer(b, t))
        if self.benchmark.size == 8:
            return float(self.arithmetic.steps_float64(b, t))
        return float(self.arithmetic.steps_narrow(b, t))

    def _saturation(self, b: Array, t: Array) -> None:
        limit_b, limit_t = self.benchmark.limit, self.target.limit
        if limit_t is None or float(np.abs(t).max(initial=0)) < limit_t:
            return
        at_limit = np.abs(t) == limit_t
        if limit_b is not None:
            at_limit &= np.abs(b) != limit_b
        self.saturated += int(np.count_nonzero(at_limit))

    def result(self) -> Distance:
        dot, bb, tt, dd = (float(x) for x in self.state[:4])
        if self.wide:
            self.doubtful |= min(bb, tt, dd) < _SMALL
            large = [s for s, d in ((bb, self.benchmark), (tt, self.target)) if d.large_integers]
            self.doubtful |= max(large, default=0.0) >= _EXACT
        norm_b, norm_t, euclidean = math.sqrt(bb), math.sqrt(tt), math.sqrt(dd)
        # an element of several numbers is one element
        each = self.benchmark.numbers
        scale = norm_b or norm_t
        cosine = None if norm_b != norm_t else 1.0
        if norm_b and norm_t:
            cosine = cosine_of(dot, norm_b, norm_t)
        largest = float(self.state[4])
        return Distance(
            size=self.size // each,
            identical=False,
            euclidean=euclidean,
            error=euclidean / scale if scale else 0.0,
            cosine=cosine,
            max_abs_err=largest,
            max_abs_index=int(self.where[0]) // each if largest > 0 else None,
            max_rel_err=float(self.state[5]),
            ulp_max=None if math.isnan(self.steps) else self.steps,
            within_1e3=int(self.where[1]) / self.size if self.size else 1.0,
            within_5e3=int(self.where[2]) / self.size if self.size else 1.0,
            saturated=self.saturated,
            nonfinite_benchmark=self.nonfinite[0],
            nonfinite_target=self.nonfinite[1],
            nonfinite_same=self.nonfinite[2],
        )
