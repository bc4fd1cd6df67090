"""One reading of a tensor by numba: numbers by their definition in
:mod:`rlprobe.capture.light.onepass`, and sketches by coordinates as
:meth:`rlprobe.capture.light.coordinates.Batch.sketch` has them from torch.

Whole rows are :mod:`rlprobe.capture.light.onepass_rows`'; other loops over columns are what LLVM
makes vectors of. Nothing is reassociated or contracted, so that the bits are numpy's and torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from rlprobe.capture.light import onepass_rows
from rlprobe.compiled import compiled, pointer
from rlprobe.sketch import K

#: As in the definition; numba freezes globals of the module that a loop is in.
_WIDTH, _RUN, _NUMBERS = 8 * K, 16, 4


@compiled()
def read(address: Any, count: Any, signs: Any, out: Any) -> None:
    """See :data:`rlprobe.capture.light.onepass.Reader`."""
    flat = carray(pointer(address), (count,), np.float32)
    columns = np.empty((5, _WIDTH), np.float32)
    high, low, one, two, three = columns[0], columns[1], columns[2], columns[3], columns[4]
    wide = np.zeros((3, _WIDTH), np.float64)
    sums, squares, buckets = wide[0], wide[1], wide[2]
    for c in range(_WIDTH):
        high[c] = low[c] = flat[0]
        one[c] = two[c] = three[c] = 0
    rows = flat.size // _WIDTH
    end = address + 4 * flat.size
    sign = np.int64(0) if signs is None else np.int64(signs.ctypes.data)
    row = 0
    while row + _RUN <= rows:
        at, ahead = address + 4 * _WIDTH * row, address + 4 * _WIDTH * (row + _RUN)
        if signs is None:
            onepass_rows.run(at, 0, columns, wide, ahead, end - ahead)
        else:
            onepass_rows.run_signed(at, sign + _WIDTH * row, columns, wide, ahead, end - ahead)
        row += _RUN
    while row < rows:
        at = address + 4 * _WIDTH * row
        several = row + 4 <= rows
        if signs is None and several:
            onepass_rows.four(at, 0, columns, wide, 0, 0)
        elif signs is None:
            onepass_rows.one(at, 0, columns, wide, 0, 0)
        elif several:
            onepass_rows.four_signed(at, sign + _WIDTH * row, columns, wide, 0, 0)
        else:
            onepass_rows.one_signed(at, sign + _WIDTH * row, columns, wide, 0, 0)
        row += 4 if several else 1
    for c in range(_WIDTH):
        sums[c] += one[c]
        squares[c] += two[c]
        buckets[c] += three[c]
    at = rows * _WIDTH
    for c in range(flat.size - at):
        v = flat[at + c]
        high[c] = v if v > high[c] else high[c]
        low[c] = v if v < low[c] else low[c]
        sums[c] += v
        squares[c] += v * v
        if signs is not None:
            buckets[c] += v * np.float32(signs[at + c])
    _finish(high, low, sums, squares, buckets, out)


@compiled()
def _finish(high: Any, low: Any, sums: Any, squares: Any, buckets: Any, out: Any) -> None:
    """Add the columns up, from the left."""
    most, least, total, square = high[0], low[0], 0.0, 0.0
    for c in range(_WIDTH):
        most = max(most, high[c])
        least = min(least, low[c])
        total += sums[c]
        square += squares[c]
    out[0], out[1], out[2], out[3] = most, least, total, square
    for bucket in range(K):
        found = 0.0
        for c in range(bucket, _WIDTH, K):
            found += buckets[c]
        out[_NUMBERS + bucket] = found


@compiled()
def by_coordinates(
    rows: Any, shifts: Any, own: Any, features: Any, first: Any, width: Any, out: Any
) -> None:
    """Add a sketch by coordinates to ``out``.

    Args:
        rows: fp32, shape (tokens, features of this shard).
        shifts, own: of the tokens, shift and sign.
        features: signs of the features, fp32.
        first, width: the shard's first feature, and how many features the whole has.
        out: fp64, shape (groups, K).
    """
    count = rows.shape[1]
    # by shift first: from here on there are K rows, however many tokens there were
    moved = np.zeros((K, count), np.float32)
    for token in range(rows.shape[0]):
        line, sum_of, sign = rows[token], moved[shifts[token]], own[token]
        for j in range(count):
            sum_of[j] += line[j] * sign
    groups = out.shape[0]
    for shift in range(K):
        line = moved[shift]
        j = 0
        while j < count:
            feature = first + j
            group = feature * groups // width
            # the next feature that is in another group, or whose bucket is 0 again
            beyond = -(-(group + 1) * width // groups) - first
            bucket = (shift + feature) % K
            beyond = min(beyond, j + K - bucket, count)
            sums = out[group, bucket : bucket + beyond - j]
            values, signs = line[j:beyond], features[j:beyond]
            for i in range(beyond - j):
                sums[i] += np.float64(values[i] * signs[i])
            j = beyond
