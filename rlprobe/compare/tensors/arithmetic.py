"""What one block adds to the figures: compiled where there is much to read, else numpy's.

The compiled kernels are an order of magnitude quicker, and importing them costs more than a small
comparison takes. Both give the same figures, sums up to the order in which they are added.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np

from rlprobe.imports import hidden, uncollected

#: Bytes of tensors from which the import of the compiled kernels pays.
WORTHWHILE = 128 << 20

_KERNELS = "rlprobe.compare.tensors.kernels"


class Arithmetic(Protocol):
    """Figures of blocks; ``state`` and ``where`` are :func:`.kernels.block32`'s."""

    def add(self, b: Any, t: Any, start: int, state: Any, where: Any) -> None: ...
    def steps_narrow(self, b: Any, t: Any) -> float: ...
    def steps_float64(self, b: Any, t: Any) -> float: ...
    def steps_integer(self, b: Any, t: Any) -> float: ...


def expect(size: int) -> None:
    """Load the compiled kernels if ``size`` bytes are worth it."""
    if size >= WORTHWHILE:
        # numba looks for SciPy's version and for a configuration in YAML, and needs neither
        with uncollected(), hidden("scipy", "yaml"):
            from rlprobe.compare.tensors import kernels  # noqa: F401


def chosen(wide: bool) -> Arithmetic:
    """Compiled kernels where they are loaded; ``wide``: float64 instead of float32."""
    return Compiled(wide) if _KERNELS in sys.modules else Plain(wide)


class Compiled:
    """numba's kernels."""

    def __init__(self, wide: bool) -> None:
        from rlprobe.compare.tensors import kernels

        self._block = kernels.block64 if wide else kernels.block32
        self._scratch = np.empty((2, kernels.INNER + 1), np.float64 if wide else np.float32)
        self._bits = self._scratch.view(np.int64 if wide else np.int32)
        self.steps_narrow = kernels.steps_narrow
        self.steps_float64 = kernels.steps_float64
        self.steps_integer = kernels.steps_integer

    def add(self, b: Any, t: Any, start: int, state: Any, where: Any) -> None:
        self._block(b, t, start, state, where, self._scratch, self._bits)


class Plain:
    """The same with numpy."""

    def __init__(self, wide: bool) -> None:
        self._float: Any = np.float64 if wide else np.float32
        self._epsilon = self._float(np.finfo(self._float).eps)
        self._low, self._high = self._float(0.001), self._float(0.005)

    def add(self, b: Any, t: Any, start: int, state: Any, where: Any) -> None:
        if not b.size:
            return
        with np.errstate(all="ignore"):
            x, y = b.astype(np.float64), t.astype(np.float64)
            d = y - x
            state[:4] += [float(x @ y), float(x @ x), float(y @ y), float(d @ d)]
            magnitudes = np.abs(d)
            most = magnitudes.max()
            if most > state[4] or where[0] < 0:
                state[4] = most
                where[0] = start + int(magnitudes.argmax())
            e = np.where(b == 0, self._epsilon, self._float(0))
            benchmark = b + e
            relative = np.abs(((t + e) - benchmark) / benchmark)
        where[1] += int(np.count_nonzero(relative < self._low))
        where[2] += int(np.count_nonzero(relative < self._high))
        state[5] = max(state[5], float(relative.max()))

    def steps_narrow(self, b: Any, t: Any) -> float:
        if not b.size:
            return 0.0
        mask = 1 << (b.itemsize * 8 - 1)
        p, q = b.astype(np.int64), t.astype(np.int64)
        p, q = (np.where(side >= 0, side, -(side + mask)) for side in (p, q))
        return float(np.abs(p - q).max())

    def steps_float64(self, b: Any, t: Any) -> float:
        low = np.int64(-(1 << 63))
        with np.errstate(over="ignore"):
            p, q = (np.where(side >= 0, side, -(side - low)) for side in (b, t))
        return self.steps_integer(p, q)

    def steps_integer(self, b: Any, t: Any) -> float:
        if not b.size:
            return 0.0
        with np.errstate(over="ignore"):
            gap = np.where(b > t, b - t, t - b)
            apart = np.abs(b.astype(np.float64) - t.astype(np.float64))
        one_side = (b >= 0) == (t >= 0)
        return float(np.where(one_side, gap, apart).max())
