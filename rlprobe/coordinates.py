"""Sketches keyed by what an element is, not where it lies (numpy only).

An element of an activation belongs to a token of a sample and to a feature of the model. Its key is
(sample, position among the sample's own tokens, feature), so that the sketch ::

    y[b] = sum of sign(t) * sign(j) * x[t, j]   over all t, j with (shift(t) + j) mod K == b

is the same however tokens and features are divided: sketches of micro-batches, of data-parallel
ranks, of tensor-parallel shards and of partial sums add up to that of the whole, and padding never
enters. ``shift(t)`` and ``sign(t)`` are bits of a hash of the token's key, ``sign(j)`` is that of
:mod:`rlprobe.sketch`. A distance of two such sketches estimates that of the tensors without bias,
with the relative standard deviation of :func:`rlprobe.sketch.deviation`.

A tensor has :data:`GROUPS` of them, one for each of as many equal stretches of its features, so
that where in the width two sides part is known; their sum is the sketch of all.

A sample that occurs twice in a step has one key: its two copies are added up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlprobe.sketch import PERIOD, K, signs

#: Stretches of a tensor's features that are sketched apart.
GROUPS = 8

Keys = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)
#: The bit of a token's key that is its sign.
_SIGN_BIT = np.uint64(40)


def _mixed(values: Keys) -> Keys:
    """MurmurHash3's 64-bit finaliser (A. Appleby, public domain)."""
    h = values.copy()
    for multiplier in _MULTIPLIERS:
        h ^= h >> _SHIFT
        h *= multiplier
    return np.asarray(h ^ (h >> _SHIFT), np.uint64)


def token_keys(tokens: Sequence[int] | npt.NDArray[np.integer]) -> Keys:
    """The keys of a sample's tokens, in order: shape (len(tokens),).

    Args:
        tokens: the ids of all its tokens, prompt and response, without padding.
    """
    ids = np.ascontiguousarray(tokens, dtype="<i8")
    digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
    sample = np.frombuffer(digest, "<u8")[0]
    with np.errstate(over="ignore"):
        return _mixed(np.arange(len(ids), dtype=np.uint64) * _GOLDEN + sample)


def shifts(keys: Keys) -> npt.NDArray[np.int64]:
    """``shift(t)``: by how many buckets a token's features are moved, 0 to K - 1."""
    return (keys % np.uint64(K)).astype(np.int64)


def token_signs(keys: Keys) -> npt.NDArray[np.float32]:
    """``sign(t)``: +1 or -1."""
    return np.where((keys >> _SIGN_BIT) & np.uint64(1), 1.0, -1.0).astype(np.float32)


def groups(width: int) -> int:
    """How many stretches the features of a tensor are divided into: GROUPS, or one."""
    return GROUPS if width % GROUPS == 0 and width <= PERIOD else 1


def sketch(
    values: npt.ArrayLike, keys: Keys, first: int = 0, width: int | None = None
) -> npt.NDArray[np.float64]:
    """Reference sketch in fp64, shape (groups of the width, K).

    Args:
        values: shape (tokens, features of this shard).
        keys: the tokens' keys.
        first: the shard's first feature in the whole.
        width: features of the whole; None: the shard is the whole.
    """
    x = np.asarray(values, np.float64)
    count = x.shape[1]
    width = count if width is None else width
    number = groups(width)
    out = np.zeros((number, K))
    signed = x * signs(first, count) * token_signs(keys).astype(np.float64)[:, None]
    feature = np.arange(first, first + count)
    bucket = (shifts(keys)[:, None] + feature) % K
    group = np.broadcast_to(feature * number // width, x.shape)
    np.add.at(out, (group, bucket), signed)
    return out
