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
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlprobe import sketch as sketch_definition
from rlprobe.capture.light.sketches import sketch

#: Rows of 0-d results kept before they are packed into one tensor: on a device every 0-d tensor
#: occupies a block of its own.
_PACK = 1024
#: Activations remembered so that a module's output is not measured again as the next one's input.
_RECENT = 6

_dtype_names: dict[torch.dtype, str] = {}
_DTENSOR = "torch.distributed.tensor.DTensor"
_NESTED = "torch.nested._internal.nested_tensor.NestedTensor"

Leaf = dict[str, Any]


class _Column:
    """0-d results of one dtype, packed now and then and read back together."""

    def __init__(self) -> None:
        self._packed: list[Tensor] = []
        self._loose: list[Tensor] = []
        self._count = 0

    def add(self, *values: Tensor) -> int:
        row = self._count
        self._loose.extend(values)
        self._count += len(values)
        if len(self._loose) >= _PACK:
            self._pack()
        return row

    def _pack(self) -> None:
        if self._loose:
            self._packed.append(torch.stack(self._loose))
            self._loose = []

    def read(self) -> list[Any]:
        self._pack()
        values: list[Any] = []
        for block in self._packed:  # transfers queue behind the computation: they wait once
            values.extend(block.tolist())
        return values


#: Where a tensor's numbers will be found: dtype of the column, first row there, sketch row (-1:
#: none), and how many numbers there are (see ``_fill``).
_Row = tuple[torch.dtype, int, int, str]


#: Of a floating-point tensor: the column's dtype, and the first of its four numbers there, which
#: are largest, smallest, mean and norm.
Place = tuple[torch.dtype, int]


class Statistics:
    """Makes leaves now and fills in their numbers later.

    Args:
        with_sketch: add a sketch to every leaf that has numbers.
    """

    def __init__(self, with_sketch: bool) -> None:
        self._with_sketch = with_sketch
        #: Called with all numbers when they are read back: see :meth:`measured`.
        self.readers: list[Callable[[Mapping[torch.dtype, list[Any]]], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._columns: defaultdict[torch.dtype, _Column] = defaultdict(_Column)
        self._sketches: list[Tensor] = []
        self._loose_sketches: list[Tensor] = []
        self._sketch_count = 0
        self._pending: list[tuple[Leaf, _Row]] = []
        self._seen: dict[Any, tuple[Tensor, _Row]] = {}
        self._recent: deque[Any] = deque()

    def leaf(self, tensor: Tensor, *, lasting: bool | None = False) -> Leaf:
        """A leaf for ``tensor`` as it is now; its numbers stand there after :meth:`resolve`.

        Args:
            tensor: any tensor: DTensors give their local shard, nested ones their values; empty,
                meta and fake tensors give no numbers.
            lasting: remember its numbers for the whole stage (True: parameters that cannot
                change), for the next few calls (False), or not at all (None).
        """
        kind, local, extra = _unpack(tensor)
        dtype = local.dtype
        shape = local.shape
        needs_gradient = tensor.requires_grad
        leaf: Leaf = {
            "type": kind,
            "dtype": _dtype_names.get(dtype) or _name_dtype(dtype),
            "shape": list(shape),
            "Max": None,
            "Min": None,
            "Mean": None,
            "Norm": None,
            "requires_grad": needs_gradient,
        }
        if extra is not None:
            leaf.update(extra)
        if not has_values(local):
            return leaf
        if needs_gradient:
            local = local.detach()
        # Inference tensors keep no version: a second look could not tell whether they changed.
        if lasting is None or local.is_inference():
            self._pending.append((leaf, self._measure(local)))
            return leaf
        key = (local.data_ptr(), local._version, shape, local.stride(), dtype)
        known = self._seen.get(key)
        # FSDP frees the storage of a parameter it reshards and fills it again without a new
        # version: its old address may be another parameter's by now.
        if known is not None and known[0].data_ptr() == key[0]:
            self._pending.append((leaf, known[1]))
            return leaf
        row = self._measure(local)
        self._pending.append((leaf, row))
        # The reference keeps the address from being given to another tensor while it is known.
        self._seen[key] = (local, row)
        if not lasting and known is None:
            recent = self._recent
            recent.append(key)
            if len(recent) > _RECENT:
                self._seen.pop(recent.popleft(), None)
        return leaf

    def measured(self, tensor: Tensor) -> Place | None:
        """Where the numbers of a tensor will stand that was measured just before, at least in fp32.

        None where it was not, or where its numbers are rounded to a shorter format.
        """
        _, local, _ = _unpack(tensor)
        if local.dtype not in (torch.float32, torch.float64) or local.is_inference():
            return None
        local = local.detach()
        key = (local.data_ptr(), local._version, local.shape, local.stride(), local.dtype)
        known = self._seen.get(key)
        if known is None or known[0].data_ptr() != key[0] or known[1][3] != "full":
            return None
        return known[1][0], known[1][1]

    def forget(self) -> None:
        """Drop what is remembered of tensors (after an optimizer step, at the end of a stage)."""
        self._seen.clear()
        self._recent.clear()

    def _measure(self, x: Tensor) -> _Row:
        dtype = x.dtype
        sketched = self._with_sketch
        column = self._columns[dtype]
        if x.dim() == 0 and not dtype.is_complex and dtype != torch.bool:
            return dtype, column.add(x.clone()), -1, "same"  # the value itself needs no sketch
        if dtype.is_floating_point:
            high, low = _ends(x)
            row = column.add(high, low, torch.mean(x), torch.linalg.vector_norm(x))
            kind = "full"
        elif dtype == torch.bool:
            row = column.add(x.any(), x.all())
            kind = "ends"
        elif dtype.is_complex:
            size = x.abs()
            dtype, sketched, kind = size.dtype, False, "full"
            column = self._columns[dtype]
            row = column.add(size.max(), size.min(), size.mean(), torch.linalg.vector_norm(size))
        else:
            row = column.add(*_ends(x))
            kind = "ends"
        return dtype, row, self._add_sketch(x) if sketched else -1, kind

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
        values = {dtype: column.read() for dtype, column in self._columns.items()}
        for reader in self.readers:
            reader(values)
        for leaf, (dtype, row, sketch_row, kind) in self._pending:
            _fill(leaf, values[dtype], row, kind)
            if sketch_row >= 0:
                encoded = sketches[sketch_row]
                if encoded is None:
                    leaf.setdefault("NonFinite", "overflow")
                else:
                    leaf["Sketch"] = encoded
        filled = len(self._pending)
        self._reset()
        return filled


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest and smallest value: on a device in one launch, on a CPU in the quicker two passes."""
    if x.device.type == "cpu":
        return torch.amax(x), torch.amin(x)
    low, high = torch.aminmax(x)
    return high, low


def _name_dtype(dtype: torch.dtype) -> str:
    name = _dtype_names[dtype] = str(dtype)
    return name


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
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    cls = type(tensor)
    if cls is not Tensor and cls.__name__ in ("FakeTensor", "FunctionalTensor"):
        return False
    dtype = tensor.dtype
    return dtype is torch.float32 or dtype.itemsize > 1 or not dtype.is_floating_point  # not fp8


def _fill(leaf: Leaf, values: list[Any], row: int, kind: str) -> None:
    if kind == "ends":  # integers and booleans
        leaf["Max"], leaf["Min"] = values[row], values[row + 1]
        return
    if kind == "same":  # one value: msprobe gives it four times
        leaf["Max"] = leaf["Min"] = leaf["Mean"] = leaf["Norm"] = values[row]
    else:
        leaf["Max"], leaf["Min"], leaf["Mean"], leaf["Norm"] = values[row : row + 4]
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
    finite = np.logical_and.reduce(np.isfinite(block), axis=1)
    return [
        sketch_definition.encode(row) if good else None
        for row, good in zip(block, finite, strict=True)
    ]
