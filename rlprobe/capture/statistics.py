"""Statistics of tensors in msprobe's leaf format, read back from the device once a stage.

A leaf of dump.json is ``{"type", "dtype", "shape", "Max", "Min", "Mean", "Norm",
"requires_grad"}`` (mindstudio-probe 26, ``PytorchDataProcessor._analyze_tensor``); ours may add

- ``Sketch``: see :mod:`rlprobe.sketch`;
- ``NonFinite``: ``nan`` or ``inf`` where the tensor holds such values, ``overflow`` where every
  value is finite but the norm or the sketch is not (additive attention masks of -3.4e38).

The four numbers come from the same operations as msprobe's, so that they agree bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlprobe import sketch as sketch_definition
from rlprobe.capture.sketches import sketch

#: Rows of 0-d results kept before they are packed into one tensor: on a device every 0-d tensor
#: occupies a block of its own.
_PACK = 1024
#: Activations remembered so that a module's output is not measured again as the next one's input.
_RECENT = 6

_F32 = frozenset({torch.float32, torch.float16, torch.bfloat16})
_dtype_names: dict[torch.dtype, str] = {}
_DTENSOR = "torch.distributed.tensor.DTensor"
_NESTED = "torch.nested._internal.nested_tensor.NestedTensor"

Leaf = dict[str, Any]


class _Column:
    """0-d results of one kind (fp32, fp64 or integer), packed now and then."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.packed: list[Tensor] = []
        self.loose: list[Tensor] = []
        self.count = 0

    def add(self, values: tuple[Tensor, ...]) -> int:
        row = self.count
        self.loose.extend(values)
        self.count += len(values)
        if len(self.loose) >= _PACK:
            self.pack()
        return row

    def pack(self) -> None:
        if self.loose:
            dtype = self.dtype
            self.packed.append(torch.stack([v.to(dtype) for v in self.loose]))
            self.loose = []

    def read(self) -> list[Any]:
        self.pack()
        values: list[Any] = []
        for block in self.packed:  # one transfer per 1024 results, queued behind the computation
            values.extend(block.tolist())
        return values


class Statistics:
    """Makes leaves now and fills in their numbers later.

    Args:
        with_sketch: add a sketch to every leaf that has numbers.
    """

    def __init__(self, with_sketch: bool) -> None:
        self._with_sketch = with_sketch
        self._reset()

    def _reset(self) -> None:
        self._f32 = _Column(torch.float32)
        self._f64 = _Column(torch.float64)
        self._int = _Column(torch.int64)
        self._sketches: list[Tensor] = []
        self._loose_sketches: list[Tensor] = []
        self._sketch_count = 0
        self._pending: list[tuple[Leaf, _Column, int, int, str]] = []
        self._seen: dict[Any, tuple[Tensor, int, _Column, int, int, str]] = {}
        self._recent: list[Any] = []

    def leaf(self, tensor: Tensor, *, lasting: bool = False) -> Leaf:
        """A leaf for ``tensor`` as it is now; its numbers stand there after :meth:`resolve`.

        Args:
            tensor: any tensor: DTensors give their local shard, nested ones their values; empty,
                meta and fake tensors give no numbers.
            lasting: remember it for the whole stage (parameters) rather than for a few calls.
        """
        kind, local, extra = _unpack(tensor)
        dtype = local.dtype
        name = _dtype_names.get(dtype)
        if name is None:
            name = _dtype_names[dtype] = str(dtype)
        leaf: Leaf = {
            "type": kind,
            "dtype": name,
            "shape": list(local.shape),
            "Max": None,
            "Min": None,
            "Mean": None,
            "Norm": None,
            "requires_grad": tensor.requires_grad,
        }
        if extra is not None:
            leaf.update(extra)
        if not has_values(local):
            return leaf
        if local.is_inference():  # such tensors keep no version: what they hold cannot be trusted
            self._pending.append((leaf, *self._measure(local)))
            return leaf
        key = (local.data_ptr(), local.shape, local.stride(), dtype)
        known = self._seen.get(key)
        # FSDP frees the storage of a parameter it reshards and fills it again without a new
        # version: its old address may be another parameter's by now.
        if known is not None and known[1] == local._version and known[0].data_ptr() == key[0]:
            self._pending.append((leaf, *known[2:]))
            return leaf
        measured = self._measure(local)
        self._pending.append((leaf, *measured))
        # The reference keeps the address from being given to another tensor while it is known.
        self._seen[key] = (local, local._version, *measured)
        if not lasting and known is None:
            self._recent.append(key)
            if len(self._recent) > _RECENT:
                self._seen.pop(self._recent.pop(0), None)
        return leaf

    def forget(self) -> None:
        """Drop what is remembered of tensors (after an optimizer step, at the end of a stage)."""
        self._seen.clear()
        self._recent.clear()

    def _measure(self, tensor: Tensor) -> tuple[_Column, int, int, str]:
        """-> column, first row, sketch row (-1: none), kind (``full``, ``ends`` or ``same``)."""
        x = tensor.detach()
        dtype = x.dtype
        sketched = self._with_sketch and dtype != torch.bool
        if dtype.is_floating_point:
            column = self._f64 if dtype == torch.float64 else self._f32
            if x.dim() == 0:
                row, kind = column.add((x.clone(),)), "same"
                sketched = False  # the value itself is there
            else:
                low, high = torch.aminmax(x)
                row = column.add((high, low, torch.mean(x), torch.linalg.vector_norm(x)))
                kind = "full"
        elif dtype == torch.bool:
            row, kind, column = self._int.add((x.any(), x.all())), "bool", self._int
            sketched = self._with_sketch
        elif dtype.is_complex:
            size = x.abs()
            column = self._f64 if size.dtype == torch.float64 else self._f32
            row = column.add((size.max(), size.min(), size.mean(), torch.linalg.vector_norm(size)))
            kind, sketched = "full", False
        elif x.dim() == 0:
            row, kind, column, sketched = self._int.add((x.clone(),)), "same", self._int, False
        else:
            low, high = torch.aminmax(x)
            row, kind, column = self._int.add((high, low)), "ends", self._int
        return column, row, self._add_sketch(x) if sketched else -1, kind

    def _add_sketch(self, tensor: Tensor) -> int:
        self._loose_sketches.append(sketch(tensor))
        self._sketch_count += 1
        if len(self._loose_sketches) >= _PACK:
            self._pack_sketches()
        return self._sketch_count - 1

    def _pack_sketches(self) -> None:
        if self._loose_sketches:
            self._sketches.append(torch.stack(self._loose_sketches))
            self._loose_sketches = []

    def resolve(self) -> int:
        """Read all numbers back, fill every leaf made so far, and start afresh.

        Returns:
            the number of leaves filled.
        """
        self._pack_sketches()
        sketches: list[str | None] = []
        for block in self._sketches:
            sketches.extend(_encoded(block.cpu().numpy()))
        values = {id(c): c.read() for c in (self._f32, self._f64, self._int)}
        for leaf, column, row, sketch_row, kind in self._pending:
            _fill(leaf, values[id(column)], row, kind)
            if sketch_row >= 0:
                encoded = sketches[sketch_row]
                if encoded is None:
                    leaf.setdefault("NonFinite", "overflow")
                else:
                    leaf["Sketch"] = encoded
        filled = len(self._pending)
        self._reset()
        return filled


def _unpack(tensor: Tensor) -> tuple[str, Tensor, Leaf | None]:
    """Type name as msprobe spells it, the plain tensor inside, and DTensor's layout."""
    cls = type(tensor)
    if cls is Tensor or cls is torch.nn.Parameter:
        if tensor.is_nested:
            return _NESTED, tensor.values(), None
        return "torch.Tensor", tensor, None
    local = getattr(tensor, "_local_tensor", None)
    if local is not None and hasattr(tensor, "placements"):
        return _DTENSOR, local, _placements(tensor)
    if tensor.is_nested:
        return _NESTED, tensor.values(), None
    return "torch.Tensor", tensor, None


def _placements(tensor: Any) -> Leaf:
    placements: list[Leaf] = []
    for placement in tensor.placements:
        if placement.is_shard():
            placements.append({"Shard": {"dim": placement.dim}})
        elif placement.is_replicate():
            placements.append({"Replicate": {}})
        elif placement.is_partial():
            placements.append({"Partial": {"reduce_op": str(placement.reduce_op)}})
    return {"device_mesh": tensor.device_mesh.mesh.tolist(), "placements": placements}


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that can be read (not empty, meta, fake or sparse)."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided:
        return False
    if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        return False
    return tensor.dtype.itemsize > 1 or not tensor.dtype.is_floating_point  # no fp8 arithmetic


def _fill(leaf: Leaf, values: list[Any], row: int, kind: str) -> None:
    if kind == "full":
        leaf["Max"], leaf["Min"], leaf["Mean"], leaf["Norm"] = values[row : row + 4]
    elif kind == "same":
        leaf["Max"] = leaf["Min"] = leaf["Mean"] = leaf["Norm"] = values[row]
    elif kind == "bool":
        leaf["Max"], leaf["Min"] = bool(values[row]), bool(values[row + 1])
        return
    else:
        leaf["Max"], leaf["Min"] = values[row], values[row + 1]
        return
    high, low, norm = leaf["Max"], leaf["Min"], leaf["Norm"]
    if math.isfinite(norm) and math.isfinite(leaf["Mean"]):
        return
    if math.isnan(high) or math.isnan(low):
        leaf["NonFinite"] = "nan"
    elif math.isinf(high) or math.isinf(low):
        leaf["NonFinite"] = "inf"
    else:
        leaf["NonFinite"] = "overflow"


def _encoded(block: npt.NDArray[np.float32]) -> list[str | None]:
    # A tensor with NaN, Inf or overflowing sums has no sketch that means anything.
    finite = np.isfinite(block).all(axis=1).tolist()
    return [
        sketch_definition.encode(row) if good else None
        for row, good in zip(block, finite, strict=True)
    ]
