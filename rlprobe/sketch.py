"""Linear sketches: the definition both sides of a comparison share (numpy only).

A sketch of a tensor ``x`` with ``n`` elements in row-major order is ``K = 61`` numbers::

    y[b] = sum of sign(j) * x[j]   over all j with j mod K == b

It is linear, so ``sum((y_b - y_t) ** 2)`` estimates ``||x_b - x_t||**2`` without bias, from 61
floats a tensor, with a relative standard deviation of ``sqrt(2 / K)`` (9 % of the norm itself):
Alon, Matias, Szegedy, "The space complexity of approximating the frequency moments", 1996;
Charikar, Chen, Farach-Colton, "Finding frequent items in data streams", 2002. ``K`` is a prime
that divides no usual width: otherwise one wrong channel falls into a single bucket, and a single
bucket estimates nothing.

Signs are the lowest bit of MurmurHash3's 32-bit finaliser of the index. They repeat after
``PERIOD`` elements, each repetition flipped as a whole by a sign of its own, so that a table of
bounded size serves a tensor of any length. A shard that begins at a known offset of the whole
tensor uses the signs and buckets of those positions: sketches of disjoint shards add up.
"""

from __future__ import annotations

import base64
import binascii
import math

import numpy as np
import numpy.typing as npt

from rlprobe.errors import DumpError

#: Buckets of a tensor's sketch.
K = 61
#: Signs repeat (up to a flip of the whole block) after this many elements.
PERIOD = 1 << 24
#: Prefix of an encoded sketch: msprobe refuses strings that begin with ``+ - = % @``.
PREFIX = "b64:"

#: What a router's choice is called among a call's records with token sketches.
CHOSEN = ".output.chosen"

_BLOCK_SEED = 0x9E3779B9


def murmur3_finaliser(index: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's fmix32 of every element (A. Appleby, public domain); a bijection of 32 bits."""
    h = index.copy()
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def base_signs(count: int) -> npt.NDArray[np.int8]:
    """The first ``count`` signs of the table, each +1 or -1; ``count`` is at most PERIOD."""
    if not 0 <= count <= PERIOD:
        raise ValueError(f"{count} signs asked for; the table has {PERIOD}")
    bits = murmur3_finaliser(np.arange(count, dtype=np.uint32)) & np.uint32(1)
    return bits.astype(np.int8) * np.int8(2) - np.int8(1)


def block_sign(block: int) -> int:
    """Sign of the ``block``-th repetition of the table: +1 for the first, pseudo-random after."""
    if block == 0:
        return 1
    seed = np.array([(block + _BLOCK_SEED) & 0xFFFFFFFF], dtype=np.uint32)
    return int(murmur3_finaliser(seed)[0] & np.uint32(1)) * 2 - 1


def signs(start: int, count: int) -> npt.NDArray[np.int8]:
    """Signs of the elements ``start`` .. ``start + count - 1`` of a flattened tensor."""
    out = np.empty(count, dtype=np.int8)
    done = 0
    while done < count:
        block, within = divmod(start + done, PERIOD)
        take = min(count - done, PERIOD - within)
        out[done : done + take] = base_signs(within + take)[within:] * np.int8(block_sign(block))
        done += take
    return out


def sketch(values: npt.ArrayLike, offset: int = 0) -> npt.NDArray[np.float32]:
    """Reference sketch of ``values``, computed in fp64; shape (61,), fp32.

    Args:
        values: real numbers of any shape, taken in row-major order.
        offset: position of the first value in the whole flattened tensor (shards).
    """
    flat = np.asarray(values, dtype=np.float64).reshape(-1)
    out = np.zeros(K)
    chunk = K * 65536
    for start in range(0, flat.size, chunk):
        part = flat[start : start + chunk]
        signed = part * signs(offset + start, part.size)
        padded = np.zeros(-(-part.size // K) * K)
        padded[: part.size] = signed
        out += np.roll(padded.reshape(-1, K).sum(axis=0), (offset + start) % K)
    return out.astype(np.float32)


def encode(values: npt.ArrayLike) -> str:
    """``b64:`` and the base64 of little-endian float32, as it stands in a dump.json leaf."""
    raw = np.asarray(values, dtype="<f4").tobytes()
    return PREFIX + base64.b64encode(raw).decode("ascii")


def decode(text: str) -> npt.NDArray[np.float32]:
    """The inverse of :func:`encode`; shape (61,).

    Raises:
        DumpError: not ``b64:``, not base64, or not 61 floats.
    """
    if not isinstance(text, str) or not text.startswith(PREFIX):
        raise DumpError(f"a sketch must begin with {PREFIX!r}; found {str(text)[:20]!r}")
    try:
        raw = base64.b64decode(text[len(PREFIX) :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise DumpError(f"a sketch is not base64: {error}") from error
    if len(raw) != 4 * K:
        raise DumpError(f"a sketch must hold {K} floats (244 bytes); found {len(raw)} bytes")
    return np.frombuffer(raw, dtype="<f4").astype(np.float32)


def distance(benchmark: npt.ArrayLike, target: npt.ArrayLike) -> float:
    """Estimate of ``||b - t||`` (L2) from the sketches of two tensors, each of shape (k,).

    How far it is to be believed: :func:`deviation`, and :mod:`rlprobe.sketch_floors`.
    """
    difference = np.asarray(benchmark, np.float64) - np.asarray(target, np.float64)
    return float(np.linalg.norm(difference))


def distances(
    benchmark: npt.NDArray[np.floating], target: npt.NDArray[np.floating]
) -> npt.NDArray[np.float64]:
    """:func:`distance` of many pairs at once: shapes (n, k), a row a sketch; (n,)."""
    return norms(np.subtract(target, benchmark, dtype=np.float64))


def norms(sketches: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Estimates of the tensors' own norms (L2): shape (n, k), a row a sketch; (n,)."""
    wide = sketches.astype(np.float64, copy=False)
    found: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", wide, wide))
    return found


def deviation(k: int = K) -> float:
    """One standard deviation of an estimated distance, relative to it; ``k`` buckets."""
    return 1.0 / math.sqrt(2.0 * k)
