"""All that is recorded of a large CPU tensor, in one reading of its memory.

Five operations read a tensor five times, which is most of what capture costs on a CPU. Here its
largest and smallest value, its sum, its sum of squares and its sketch are taken together. The order
of additions is part of the definition, so that both ways give the same bits: the flattened tensor
stands in rows of :data:`WIDTH`; each column is added up in fp32 over :data:`RUN` rows, top down,
and these sums in fp64; columns are added last, from the left. What is left of a row is added to the
fp64 sums.

- :func:`_plain`: numpy;
- :mod:`rlprobe.capture.light.onepass_compiled`: the same by numba, from the moment at which the
  process has read enough for its import to pay.

Where numba is not installed, as in most vendors' images, torch's operations are the quicker way and
are kept (:func:`takes`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlprobe.sketch import PERIOD, K, base_signs, block_sign

#: Elements of a row: eight times the buckets of a sketch, whole vectors of any processor.
WIDTH = 8 * K
#: fp32 additions in a row before a sum moves to fp64.
RUN = 16
#: Smaller tensors are measured by torch's operations, which their few bytes do not slow down.
LEAST = 1 << 15
#: Bytes read by numpy before numba is imported: that takes as long as they did.
WORTHWHILE = 1 << 30
#: Rows that numpy's temporaries are of.
_ROWS = 32 * RUN
#: Of what a reading leaves: high, low, sum, squares, then the sketch.
_NUMBERS = 4
#: Readings that a block of memory is kept for.
_KEPT = 256

_COMPILER = find_spec("numba") is not None

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
#: Reads so many fp32 numbers from an address on, with their signs (None: no sketch), into an array
#: of ``_NUMBERS + K``. An address, because an array over a tensor's memory takes time to make.
Reader = Callable[[int, int, "npt.NDArray[np.int8] | None", _F64], None]


class Reading(NamedTuple):
    """What was found in a tensor."""

    high: float
    low: float
    mean: float
    norm: float
    #: fp32, shape (61,); None where none was asked for.
    sketch: _F32 | None


def takes(tensor: Tensor) -> bool:
    """Whether :func:`read` can read a tensor, and is quicker than torch's operations."""
    return _COMPILER and tensor.numel() >= LEAST and is_plain(tensor)


def is_plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


def elements(tensor: Tensor) -> _F32:
    """A plain fp32 tensor's elements in a row, where they lie: to be read while it is held.

    Not ``tensor.numpy()``: from then on torch refuses to resize the storage, which FSDP2 does with
    each parameter that it has gathered.
    """
    return _array(tensor.data_ptr(), tensor.numel())


def _array(address: int, count: int) -> _F32:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


class Readings:
    """Tensors that are read one by one, and whose numbers are made together.

    Args:
        sketched: whether sketches are wanted.
    """

    def __init__(self, sketched: bool) -> None:
        self._sketched = sketched
        self._counts: list[int] = []
        self._blocks: list[_F64] = []

    def add(self, tensor: Tensor) -> bool:
        """Read a tensor that :func:`takes` accepts, as it is now.

        Returns:
            False, and nothing is kept, where a number is not finite: the tensor has NaN or
            infinity, or a sum overflows.
        """
        row = len(self._counts) % _KEPT
        if row == 0 and len(self._blocks) * _KEPT == len(self._counts):
            self._blocks.append(np.empty((_KEPT, _NUMBERS + K)))
        out = self._blocks[-1][row]
        count = tensor.numel()
        use = _reader(4 * count)
        if count <= PERIOD:
            use(tensor.data_ptr(), count, _first_signs(count) if self._sketched else None, out)
        else:
            _in_parts(use, tensor.data_ptr(), count, self._sketched, out)
        # NaN is neither larger nor smaller than anything: the sums alone tell of it
        if not (math.isfinite(out[2]) and math.isfinite(out[3])):
            return False
        self._counts.append(count)
        return True

    def found(self) -> list[Reading]:
        """The readings, in the order in which they were added.

        Mean and norm, rounded to fp32 from fp64 sums, are within fp32 round-off of torch's; a
        largest or smallest value of zero has no sign.
        """
        if not self._counts:
            return []
        rows = np.concatenate(self._blocks)[: len(self._counts)]
        numbers = np.empty((len(rows), _NUMBERS))
        numbers[:, :2] = rows[:, :2]
        numbers[:, 2] = (rows[:, 2] / np.array(self._counts)).astype(np.float32)
        numbers[:, 3] = np.sqrt(rows[:, 3]).astype(np.float32)
        numbers += 0.0
        sketches: Iterable[_F32 | None] = [None] * len(rows)
        if self._sketched:
            sketches = (rows[:, _NUMBERS:] + 0.0).astype(np.float32)
        return readings(numbers.tolist(), sketches)


def readings(numbers: list[list[float]], sketches: Iterable[_F32 | None]) -> list[Reading]:
    """Readings of their four numbers and their sketches."""
    return [
        Reading(high, low, mean, norm, own)
        for (high, low, mean, norm), own in zip(numbers, sketches, strict=True)
    ]


def read(tensor: Tensor, sketched: bool) -> Reading | None:
    """One tensor's reading, see :class:`Readings`; None where a number is not finite."""
    own = Readings(sketched)
    return own.found()[0] if own.add(tensor) else None


def _in_parts(use: Reader, address: int, count: int, sketched: bool, out: _F64) -> None:
    """Read what is longer than the table of signs."""
    out[:] = 0.0
    out[0], out[1] = -math.inf, math.inf
    part = np.empty_like(out)
    for start in range(0, count, PERIOD):
        size = min(PERIOD, count - start)
        use(address + 4 * start, size, _first_signs(size) if sketched else None, part)
        out[0], out[1] = max(out[0], part[0]), min(out[1], part[1])
        out[2:_NUMBERS] += part[2:_NUMBERS]
        if sketched:
            moved = np.roll(part[_NUMBERS:], start % K)
            out[_NUMBERS:] += block_sign(start // PERIOD) * moved


_signs = np.empty(0, dtype=np.int8)


def _first_signs(count: int) -> npt.NDArray[np.int8]:
    global _signs
    if _signs.size < count:
        _signs = base_signs(min(PERIOD, 1 << max(17, (count - 1).bit_length())))
    return _signs[:count]


class _Choice:
    """Which way is taken, and how much was read until now."""

    reader: Reader | None = None
    read = 0


def _reader(size: int) -> Reader:
    if _Choice.reader is not None:
        return _Choice.reader
    _Choice.read += size
    if _Choice.read < WORTHWHILE:
        return _plain
    from rlprobe.capture.light import onepass_compiled

    _Choice.reader = onepass_compiled.read
    return _Choice.reader


def by_coordinates(rows: Tensor) -> Callable[..., None] | None:
    """The compiled sketch by coordinates, for rows that it can read; None: let torch do it."""
    if _Choice.reader is None or not is_plain(rows):
        return None
    from rlprobe.capture.light import onepass_compiled

    found: Callable[..., None] = onepass_compiled.by_coordinates
    return found


def _plain(address: int, count: int, signs: npt.NDArray[np.int8] | None, out: _F64) -> None:
    """See :data:`Reader`: with numpy."""
    flat = _array(address, count)
    sums, squares, buckets = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros(WIDTH)
    rows = flat.size // WIDTH
    with np.errstate(all="ignore"):
        for first in range(0, rows, _ROWS):
            part = slice(first * WIDTH, min(first + _ROWS, rows) * WIDTH)
            block = flat[part]
            sums = _added(sums, block)
            squares = _added(squares, np.multiply(block, block))
            if signs is not None:
                buckets = _added(buckets, np.multiply(block, signs[part], dtype=np.float32))
        rest = flat[rows * WIDTH :]
        sums[: rest.size] += rest
        squares[: rest.size] += rest * rest
        if signs is not None:
            buckets[: rest.size] += rest * signs[rows * WIDTH :]
        out[0], out[1] = flat.max(), flat.min()
        out[2], out[3] = np.add.accumulate(sums)[-1], np.add.accumulate(squares)[-1]
        out[_NUMBERS:] = buckets.reshape(-1, K).sum(0)


def _added(sums: _F64, block: _F32) -> _F64:
    """The columns' sums with those of further rows, run by run."""
    rows = block.reshape(-1, WIDTH)
    whole = len(rows) // RUN * RUN
    runs: list[Any] = [sums[None], np.add.reduce(rows[:whole].reshape(-1, RUN, WIDTH), axis=1)]
    if whole < len(rows):
        runs.append(np.add.reduce(rows[whole:], axis=0)[None])
    found: _F64 = np.add.reduce(np.concatenate(runs, dtype=np.float64), axis=0)
    return found
