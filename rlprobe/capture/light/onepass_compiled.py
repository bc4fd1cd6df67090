"""One reading of a tensor by numba: numbers by their definition in
:mod:`rlprobe.capture.light.onepass`, and sketches by coordinates as
:meth:`rlprobe.capture.light.coordinates.Batch.sketch` has them from torch.

Loops over columns are what LLVM makes vectors of; four rows at a time leave the sums in registers.
Nothing is reassociated or contracted, so that the bits are numpy's and torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from rlprobe.compiled import compiled, pointer, prefetch
from rlprobe.sketch import K

#: As in the definition; numba freezes globals of the module that a loop is in.
_WIDTH, _RUN, _NUMBERS = 8 * K, 16, 4
#: Elements of a cache line, fp32.
_LINE = 16


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
    rows = flat.size // _WIDTH
    for first in range(0, rows, _RUN):
        last = min(first + _RUN, rows)
        for c in range(_WIDTH):
            one[c] = two[c] = three[c] = 0
        row = first
        while row + 4 <= last:
            at = row * _WIDTH
            # four rows are read side by side, which no processor takes for one stream
            for ahead in range(at + 4 * _WIDTH, at + 8 * _WIDTH, _LINE):
                prefetch(flat, ahead)
            if signs is None:
                _four(flat, at, high, low, one, two)
            else:
                _four_signed(flat, signs, at, high, low, one, two, three)
            row += 4
        while row < last:
            at = row * _WIDTH
            for c in range(_WIDTH):
                v = flat[at + c]
                high[c] = v if v > high[c] else high[c]
                low[c] = v if v < low[c] else low[c]
                one[c] += v
                two[c] += v * v
                if signs is not None:
                    three[c] += v * np.float32(signs[at + c])
            row += 1
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
def _four(flat: Any, at: Any, high: Any, low: Any, one: Any, two: Any) -> None:
    """Four rows without a sketch."""
    a = flat[at : at + _WIDTH]
    b = flat[at + _WIDTH : at + 2 * _WIDTH]
    d = flat[at + 2 * _WIDTH : at + 3 * _WIDTH]
    e = flat[at + 3 * _WIDTH : at + 4 * _WIDTH]
    for c in range(_WIDTH):
        most, least, total, square = high[c], low[c], one[c], two[c]
        for v in (a[c], b[c], d[c], e[c]):
            most = v if v > most else most
            least = v if v < least else least
            total += v
            square += v * v
        high[c] = most
        low[c] = least
        one[c] = total
        two[c] = square


@compiled()
def _four_signed(
    flat: Any, signs: Any, at: Any, high: Any, low: Any, one: Any, two: Any, three: Any
) -> None:
    """Four rows with a sketch."""
    a = flat[at : at + _WIDTH]
    b = flat[at + _WIDTH : at + 2 * _WIDTH]
    d = flat[at + 2 * _WIDTH : at + 3 * _WIDTH]
    e = flat[at + 3 * _WIDTH : at + 4 * _WIDTH]
    p = signs[at : at + _WIDTH]
    q = signs[at + _WIDTH : at + 2 * _WIDTH]
    r = signs[at + 2 * _WIDTH : at + 3 * _WIDTH]
    s = signs[at + 3 * _WIDTH : at + 4 * _WIDTH]
    for c in range(_WIDTH):
        most, least, total, square, bucket = high[c], low[c], one[c], two[c], three[c]
        for v, sign in ((a[c], p[c]), (b[c], q[c]), (d[c], r[c]), (e[c], s[c])):
            most = v if v > most else most
            least = v if v < least else least
            total += v
            square += v * v
            bucket += v * np.float32(sign)
        high[c] = most
        low[c] = least
        one[c] = total
        two[c] = square
        three[c] = bucket


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
