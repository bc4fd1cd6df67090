"""Sketches of tensors on their own device; the definition is :mod:`rlprobe.sketch`.

Signs are made once on the CPU and kept per device as one growing fp32 vector of which every
tensor uses a prefix. Sums run in chunks that stay in cache, with 61 fp64 partial sums where the
device has fp64: the accumulation error is then below :data:`rlprobe.sketch_floors.ACCUMULATION`.
What a device really reaches is measured by :func:`accumulation_floor`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from rlprobe.sketch import PERIOD, K, base_signs, block_sign

#: Rows of 61 that are summed elementwise before they are folded: 31k products, 125 kB, stay in a
#: CPU's second-level cache.
_ROWS = 512
_BLOCK = _ROWS * K
#: fp32 additions in a row before a sum moves to fp64.
_RUN = 16
#: Up to this many elements one product and one sum are quickest on a CPU.
_SINGLE = 200_000
#: Bytes of reusable product buffers per thread, for the sizes that keep coming.
_BUFFERS = 1 << 25
#: Elements per chunk on a device, where few launches matter more than locality.
_DEVICE_CHUNK = (1 << 24) // K * K

_signs: dict[torch.device, Tensor] = {}
_lock = threading.Lock()


def has_fp64(device: torch.device) -> bool:
    """Whether fp64 sums can be trusted to exist and be quick enough on this device."""
    return device.type in ("cpu", "cuda")


def device_signs(count: int, device: torch.device) -> Tensor:
    """The first ``count`` (at most PERIOD) signs as fp32 on ``device``."""
    held = _signs.get(device)
    if held is None or held.numel() < count:
        with _lock:
            size = min(PERIOD, 1 << max(17, (count - 1).bit_length()))
            # kept for calls in and out of inference mode: a tensor made in it is of no use outside
            with torch.inference_mode(False):
                held = torch.from_numpy(base_signs(size)).to(device=device, dtype=torch.float32)
            _signs[device] = held
    return held[:count]


def sketch(tensor: Tensor, offset: int = 0) -> Tensor:
    """Sketch of a real, integer or boolean tensor, on its device.

    Args:
        tensor: any shape, not empty; DTensors and nested tensors are unpacked by the caller.
        offset: position of its first element in the whole flattened tensor.

    Returns:
        fp32 tensor of shape (61,). Not finite where the input is not, or where sums overflow.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.is_floating_point():
        flat = flat.to(torch.float32)
    if offset == 0 and flat.device.type == "cpu" and flat.dtype == torch.float32:
        count = flat.numel()
        if count <= _SINGLE:
            return _small(flat, count)
        if count <= PERIOD:
            return _blocks(flat, count).to(torch.float32)
    return _general(flat, offset)


class _Buffers(threading.local):
    """Product buffers of this thread, by element count; their padding stays zero."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.bytes = 0


_buffers = _Buffers()


def _small(flat: Tensor, count: int) -> Tensor:
    """Two operations for a size seen before: a product into a kept buffer, and its sum."""
    known = _buffers.held.get(count)
    if known is None:
        rows = -(-count // K)
        # as in device_signs: an engine generates in inference mode, training does not
        with torch.inference_mode(False):
            padded = torch.zeros(rows * K)
            known = (padded[:count], padded.view(rows, K), device_signs(count, flat.device))
        if _buffers.bytes < _BUFFERS:
            _buffers.held[count] = known
            _buffers.bytes += padded.numel() * 4
    product, rows_of_61, table = known
    torch.mul(flat, table, out=product)
    return rows_of_61.sum(0)


def sketch_rows(rows: Tensor) -> Tensor:
    """:func:`sketch` of each row of short fp32 rows on a CPU, to the bit; shape (rows, 61)."""
    number, count = rows.shape
    padded = torch.zeros(number, -(-count // K) * K, dtype=torch.float32)
    torch.mul(rows, device_signs(count, rows.device), out=padded[:, :count])
    return padded.view(number, -1, K).sum(1)


_rows: list[Tensor] = []


def _sign_rows(count: int) -> list[Tensor]:
    """The CPU's signs cut into blocks, at least ``count`` of them."""
    if len(_rows) < count:
        table = device_signs(min(PERIOD, count * _BLOCK), torch.device("cpu"))
        whole = _signs[table.device]
        with torch.inference_mode(False):
            _rows[:] = whole[: whole.numel() // _BLOCK * _BLOCK].view(-1, _BLOCK).unbind(0)
    return _rows


def _blocks(flat: Tensor, count: int) -> Tensor:
    """A large fp32 tensor on a CPU: products are added up block by block, never stored."""
    blocks = count // _BLOCK
    whole = blocks * _BLOCK
    parts = flat[:whole].view(blocks, _BLOCK).unbind(0)
    table = _sign_rows(blocks)
    total = torch.zeros(K, dtype=torch.float64)
    for begin in range(0, blocks, _RUN):
        sums = parts[begin] * table[begin]
        for index in range(begin + 1, min(begin + _RUN, blocks)):
            sums.addcmul_(parts[index], table[index])
        total += sums.view(_ROWS, K).sum(0)
    if whole < count:
        rest = flat[whole:] * device_signs(count, flat.device)[whole:]
        total += _buckets(rest, False)
    return total


def _general(flat: Tensor, offset: int) -> Tensor:
    """Any dtype, device, length and offset, in chunks that cross no repetition of the signs."""
    device = flat.device
    wide = has_fp64(device)
    total = torch.zeros(K, dtype=torch.float64 if wide else torch.float32, device=device)
    chunk = _BLOCK * 2 if device.type == "cpu" else _DEVICE_CHUNK
    for start, length, first, block in _pieces(flat.numel(), offset, chunk):
        table = device_signs(first + length, device)[first:]
        part = _buckets(flat[start : start + length] * table, wide)
        shift = (offset + start) % K
        if shift:
            part = torch.roll(part, shift)
        total.add_(part, alpha=block_sign(block))
    return total.to(torch.float32)


def _pieces(count: int, offset: int, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """``(start, length, first sign, block)`` of chunks that cross no repetition of the table."""
    done = 0
    while done < count:
        block, within = divmod(offset + done, PERIOD)
        length = min(chunk, count - done, PERIOD - within)
        yield done, length, within, block
        done += length


def _buckets(products: Tensor, wide: bool) -> Tensor:
    """Sum a 1-d tensor into its 61 buckets, the first element falling into bucket 0."""
    count = products.numel()
    whole = count - count % K
    dtype = torch.float64 if wide else None
    total = products.narrow(0, 0, whole).view(-1, K).sum(0, dtype=dtype)
    if whole < count:
        total.narrow(0, 0, count - whole).add_(products.narrow(0, whole, count - whole))
    return total


def sketch_shard(local: Tensor, shape: torch.Size, dim: int, start: int) -> Tensor:
    """Sketch of a slice ``[start, start + local.shape[dim])`` along ``dim`` of a whole tensor.

    Slices along dimension 0 are one stretch of the flattened whole; along a later dimension they
    are many, and each element's own position is computed. Sketches of all slices sum to the
    whole tensor's.

    Args:
        local: the slice; shape as ``shape`` but for ``dim``.
        shape: the whole tensor's shape.
        dim: the dimension cut.
        start: index of the slice's first row along ``dim``.

    Returns:
        fp32 tensor of shape (61,).
    """
    inner = math.prod(shape[dim + 1 :])
    if dim == 0:
        return sketch(local, start * inner)
    flat = local.detach().reshape(-1)
    row = local.shape[dim] * inner
    total = torch.zeros(K, dtype=torch.float32, device=local.device)
    if row == 0:
        return total
    for outer in range(flat.numel() // row):
        position = (outer * shape[dim] + start) * inner
        total += sketch(flat[outer * row : (outer + 1) * row], position)
    return total


_floors: dict[str, float] = {}


def accumulation_floor(device: torch.device | str, count: int = 1 << 20) -> float:
    """Measured error of :func:`sketch` on ``device``, relative to the norm.

    The same pseudo-random fp32 values are sketched on the device and in fp64 on the CPU; the
    larger of a centred and a shifted set counts, since a common sign makes sums lose most. The
    result is rounded up by half for what one measurement misses, and cached.
    """
    key = str(device)
    if key not in _floors:
        generator = torch.Generator().manual_seed(0)
        worst = 0.0
        for shift in (0.0, 100.0):
            values = torch.randn(count, generator=generator) + shift
            exact = sketch(values.double()).double()
            found = sketch(values.to(device)).cpu().double()
            error = (found - exact).norm() / values.double().norm()
            worst = max(worst, float(error))
        _floors[key] = 1.5 * worst
    return _floors[key]
