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
from collections.abc import Callable
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

_COMPILER = find_spec("numba") is not None

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
#: Reads a flat array with the signs of its elements (None: no sketch) into an array of
#: ``_NUMBERS + K``.
Reader = Callable[[_F32, "npt.NDArray[np.int8] | None", _F64], None]


class Reading(NamedTuple):
    """What was found in a tensor; every number is finite."""

    high: float
    low: float
    mean: float
    norm: float
    #: fp32, shape (61,); None where none was asked for.
    sketch: _F32 | None


def takes(tensor: Tensor) -> bool:
    """Whether :func:`read` can read a tensor, and is quicker than torch's operations."""
    return _COMPILER and tensor.numel() >= LEAST and _is_plain(tensor)


def _is_plain(tensor: Tensor) -> bool:
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
    address = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(address)


def read(tensor: Tensor, sketched: bool) -> Reading | None:
    """Read a tensor that :func:`takes` accepts and that no gradient is wanted of.

    Returns:
        None where a number is not finite: the tensor has NaN or infinity, or a sum overflows.
        Else mean and norm, rounded to fp32 from fp64 sums, are within fp32 round-off of torch's;
        a largest or smallest value of zero has no sign.
    """
    flat = elements(tensor)
    use = _reader(flat.nbytes)
    found = np.empty(_NUMBERS + K)
    if flat.size <= PERIOD:
        use(flat, _first_signs(flat.size) if sketched else None, found)
    else:
        _in_parts(use, flat, sketched, found)
    high, low, total, squares = found[:_NUMBERS].tolist()
    # NaN is neither larger nor smaller than anything: the sums alone tell of it
    if not (math.isfinite(total) and math.isfinite(squares)):
        return None
    return Reading(
        high + 0.0,
        low + 0.0,
        float(np.float32(total / flat.size)) + 0.0,
        float(np.float32(math.sqrt(squares))),
        (found[_NUMBERS:] + 0.0).astype(np.float32) if sketched else None,
    )


def _in_parts(use: Reader, flat: _F32, sketched: bool, out: _F64) -> None:
    """Read what is longer than the table of signs."""
    out[:] = 0.0
    out[0], out[1] = -math.inf, math.inf
    part = np.empty_like(out)
    for start in range(0, flat.size, PERIOD):
        values = flat[start : start + PERIOD]
        use(values, _first_signs(values.size) if sketched else None, part)
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
    if _Choice.reader is None or not _is_plain(rows):
        return None
    from rlprobe.capture.light import onepass_compiled

    found: Callable[..., None] = onepass_compiled.by_coordinates
    return found


def _plain(flat: _F32, signs: npt.NDArray[np.int8] | None, out: _F64) -> None:
    """See :data:`Reader`: with numpy."""
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
