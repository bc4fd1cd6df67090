"""How far two tensors are apart, elementwise, in one pass over both.

The numbers are msprobe's where msprobe has them (cosine, Euclidean distance, largest absolute and
relative error, shares below 1e-3 and 5e-3: relative to the benchmark, in float32 for types of up to
32 bits, a zero benchmark counted as the type's epsilon), and besides: relative L2 error, where the
largest error is, the distance in representable values, elements at the type's limit, and values
that are not finite on one side only. Those equal on both sides (sign included) are left out of the
sums, as msprobe leaves them out whatever their sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlprobe.compare.tensors import kernels
from rlprobe.dumps.tensors.dtypes import Array, DType, keys, numbers
from rlprobe.dumps.tensors.tensorfile import TensorFile, TensorFileError

#: Elements per block: 1 MiB of float32 a side.
BLOCK = 1 << 18


@dataclass(frozen=True)
class Distance:
    """The result; ``None`` where a figure has no meaning."""

    size: int
    #: ``||t - b||`` and both norms.
    euclidean: float
    norm_benchmark: float
    norm_target: float
    #: ``||t - b|| / ||b||`` (``||t||`` where the benchmark is zero).
    error: float
    cosine: float | None
    max_abs_err: float
    #: Row-major index of the element with the largest absolute error; None when all are equal.
    max_abs_index: int | None
    max_rel_err: float
    #: Most representable values between two elements; the difference itself for integers.
    ulp_max: float | None
    within_1e3: float
    within_5e3: float
    #: Elements at the type's largest magnitude on the target where the benchmark's are not.
    saturated: int
    #: Elements that are not finite on either side, and those not finite in the same way.
    nonfinite_benchmark: int
    nonfinite_target: int
    nonfinite_same: int


def distance(benchmark: TensorFile, target: TensorFile) -> Distance:
    """Compare two tensors of equal size, element by element in row-major order.

    Raises:
        TensorFileError: their sizes differ.
    """
    if benchmark.size != target.size:
        raise TensorFileError(f"{benchmark.size} elements against {target.size}")
    wide = not (benchmark.dtype.narrow and target.dtype.narrow)
    state = _Accumulator(wide, benchmark.dtype, target.dtype)
    pairs = zip(benchmark.blocks(BLOCK), target.blocks(BLOCK), strict=False)
    if not (benchmark.contiguous and target.contiguous):
        pairs = zip(*_aligned(benchmark, target), strict=True)
    for raw_b, raw_t in pairs:
        state.add(raw_b, raw_t)
    return state.result()


def _aligned(benchmark: TensorFile, target: TensorFile) -> tuple[Any, Any]:
    """Blocks of equal length where a strided tensor's own blocks would be uneven."""
    return _rechunked(benchmark), _rechunked(target)


def _rechunked(tensor: TensorFile) -> Any:
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
    def __init__(self, wide: bool, benchmark: DType, target: DType) -> None:
        self.wide, self.benchmark, self.target = wide, benchmark, target
        self.state = np.zeros(6)
        self.where = np.array([-1, 0, 0], np.int64)
        self.scratch = np.empty((2, kernels.INNER + 1), np.float64 if wide else np.float32)
        self.bits = self.scratch.view(np.int64 if wide else np.int32)
        self.size = 0
        self.steps = 0.0 if benchmark == target and benchmark.kind != "complex" else math.nan
        self.saturated = 0
        self.nonfinite = [0, 0, 0]
        self.wide_sums = np.zeros(4, np.longdouble)

    def add(self, raw_b: Array, raw_t: Array) -> None:
        b, t = (
            numbers(raw, dtype, self.wide)
            for raw, dtype in ((raw_b, self.benchmark), (raw_t, self.target))
        )
        before = self.state.copy(), self.where.copy()
        self._run(b, t)
        if not np.isfinite(self.state[:4]).all():
            # Rare: something is not finite, or its square is not. Redo the block without it.
            self.state, self.where = before
            self._add_nonfinite(b, t)
        self.size += len(b)
        if self.steps == self.steps:
            self.steps = max(self.steps, self._steps(raw_b, raw_t))
        self._saturation(b, t)

    def _run(self, b: Array, t: Array) -> None:
        kernel = kernels.block64 if self.wide else kernels.block32
        kernel(b, t, self.size, self.state, self.where, self.scratch, self.bits)

    def _add_nonfinite(self, b: Array, t: Array) -> None:
        bad_b, bad_t = ~np.isfinite(b), ~np.isfinite(t)
        same = bad_b & bad_t & ((b == t) | (np.isnan(b) & np.isnan(t)))
        for place, mask in enumerate((bad_b, bad_t, same)):
            self.nonfinite[place] += int(np.count_nonzero(mask))
        bad = bad_b | bad_t
        clean_b = np.where(bad, 0, b).astype(b.dtype)
        clean_t = np.where(bad, 0, t).astype(t.dtype)
        sums = self.state[:4].copy()
        self._run(clean_b, clean_t)
        if not np.isfinite(self.state[:4]).all():
            # float64 values beyond 1e154: only a wider exponent holds their squares
            self.state[:4] = sums
            x, y = clean_b.astype(np.longdouble), clean_t.astype(np.longdouble)
            self.wide_sums += [(x * y).sum(), (x * x).sum(), (y * y).sum(), ((y - x) ** 2).sum()]
        # elements that are not finite on one side only are not close to anything
        unlike = int(np.count_nonzero(bad & ~same))
        self.where[1:] -= unlike

    def _steps(self, raw_b: Array, raw_t: Array) -> float:
        b, t = keys(raw_b, self.benchmark), keys(raw_t, self.target)
        if self.benchmark.kind == "int":
            return float(kernels.steps_integer(b, t))
        if self.benchmark.size == 8:
            return float(kernels.steps_float64(b, t))
        return float(kernels.steps_narrow(b, t))

    def _saturation(self, b: Array, t: Array) -> None:
        limit_b, limit_t = self.benchmark.limit, self.target.limit
        if limit_t is None or float(np.abs(t).max(initial=0)) < limit_t:
            return
        at_limit = np.abs(t) == limit_t
        if limit_b is not None:
            at_limit &= np.abs(b) != limit_b
        self.saturated += int(np.count_nonzero(at_limit))

    def result(self) -> Distance:
        sums = self.state[:4] + self.wide_sums
        norm_b, norm_t, euclidean = (float(root) for root in np.sqrt(sums[1:]))
        size = self.size
        scale = norm_b or norm_t
        cosine = None if norm_b != norm_t else 1.0
        if norm_b and norm_t:
            cosine = float(sums[0] / np.sqrt(sums[1]) / np.sqrt(sums[2]))
        largest = float(self.state[4])
        if self.benchmark.kind == "int" and self.benchmark == self.target:
            largest = self.steps
        return Distance(
            size=size,
            euclidean=euclidean,
            norm_benchmark=norm_b,
            norm_target=norm_t,
            error=euclidean / scale if scale else 0.0,
            cosine=cosine,
            max_abs_err=largest,
            max_abs_index=int(self.where[0]) if largest > 0 else None,
            max_rel_err=float(self.state[5]),
            ulp_max=None if math.isnan(self.steps) else self.steps,
            within_1e3=int(self.where[1]) / size if size else 1.0,
            within_5e3=int(self.where[2]) / size if size else 1.0,
            saturated=self.saturated,
            nonfinite_benchmark=self.nonfinite[0],
            nonfinite_target=self.nonfinite[1],
            nonfinite_same=self.nonfinite[2],
        )
