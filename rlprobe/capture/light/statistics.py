"""Statistics of tensors in msprobe's leaf format, read back from the device once a stage.

A leaf of dump.json is ``{"type", "dtype", "shape", "Max", "Min", "Mean", "Norm",
"requires_grad"}`` (mindstudio-probe 26, ``PytorchDataProcessor._analyze_tensor``); ours may add

- ``Sketch``: see :mod:`rlprobe.sketch`;
- ``NonFinite``: ``nan`` or ``inf`` where the tensor holds such values, ``overflow`` where every
  value is finite but the norm or the sketch is not (additive attention masks of -3.4e38).

The four numbers come from the same operations as msprobe's, so that they agree bit for bit; those
of small fp32 tensors on a CPU are made together (:mod:`rlprobe.capture.light.small`). Large fp32
tensors on a CPU are read once instead (:mod:`rlprobe.capture.light.onepass`): their largest
and smallest value agree bit for bit, mean and norm to the round-off of fp32.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from rlprobe import sketch as sketch_definition
from rlprobe.capture.light import onepass, small
from rlprobe.capture.light.sketches import sketch

#: Rows of 0-d results kept before they are packed into one tensor: on a device every 0-d tensor
#: occupies a block of its own.
_PACK = 1024
#: Activations remembered so that a module's output is not measured again as the next one's input.
_RECENT = 32

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


class Numbers:
    """What is recorded of one tensor: there at once, or once the device's results are read back.

    Attributes:
        full: mean and norm are of the tensor's values in fp32 at least.
    """

    __slots__ = ("full", "high", "kind", "low", "mean", "norm", "place", "sketch", "sketch_row")

    def __init__(self, kind: str, place: tuple[torch.dtype, int] | None, sketch_row: int) -> None:
        #: How many results there are, see :meth:`read`.
        self.kind = kind
        #: Dtype of the column and first row there.
        self.place = place
        #: -1: none.
        self.sketch_row = sketch_row
        self.full = kind == "full" and (place is None or place[0] in (torch.float32, torch.float64))
        self.high: Any = None
        self.low: Any = None
        self.mean: Any = None
        self.norm: Any = None
        self.sketch: str | None = None

    def read(self, columns: dict[torch.dtype, list[Any]], sketches: list[str | None]) -> None:
        """Take the results that were waited for."""
        if self.place is None:
            return
        values, row = columns[self.place[0]], self.place[1]
        if self.kind == "ends":  # integers and booleans
            self.high, self.low = values[row], values[row + 1]
        elif self.kind == "same":  # one value: msprobe gives it four times
            self.high = self.low = self.mean = self.norm = values[row]
        else:
            self.high, self.low, self.mean, self.norm = values[row : row + 4]
        if self.sketch_row >= 0:
            self.sketch = sketches[self.sketch_row]
        self.place = None

    def take(self, reading: onepass.Reading, sketch: str | None) -> None:
        """Take what was read on a CPU."""
        self.high, self.low, self.mean, self.norm = reading[:4]
        self.sketch = sketch

    def fill(self, leaf: Leaf) -> None:
        """Write them into a leaf."""
        leaf["Max"], leaf["Min"] = self.high, self.low
        if self.kind != "ends":
            leaf["Mean"], leaf["Norm"] = self.mean, self.norm
            if not (math.isfinite(self.norm) and math.isfinite(self.mean)):
                leaf["NonFinite"] = self._not_finite()
        if self.sketch is not None:
            leaf["Sketch"] = self.sketch
        elif self.sketch_row >= 0:
            leaf.setdefault("NonFinite", "overflow")

    def _not_finite(self) -> str:
        if math.isnan(self.high) or math.isnan(self.low):
            return "nan"
        if math.isinf(self.high) or math.isinf(self.low):
            return "inf"
        return "overflow"


class Statistics:
    """Makes leaves now and fills in their numbers later.

    Args:
        with_sketch: add a sketch to every leaf that has numbers.
    """

    def __init__(self, with_sketch: bool) -> None:
        self._with_sketch = with_sketch
        #: Called when all numbers are there: see :meth:`measured`.
        self.readers: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._columns: defaultdict[torch.dtype, _Column] = defaultdict(_Column)
        self._sketches: list[Tensor] = []
        self._loose_sketches: list[Tensor] = []
        self._sketch_count = 0
        self._measured: list[Numbers] = []
        self._large = onepass.Readings(self._with_sketch)
        self._small = small.Small(self._with_sketch)
        #: Of tensors read in one, and of small ones, in the order of their readings.
        self._of_large: list[Numbers] = []
        self._of_small: list[Numbers] = []
        self._pending: list[tuple[Leaf, Numbers]] = []
        #: Tensors are not kept alive by this: what a run frees is memory for its next tensor.
        self._seen: dict[Any, tuple[TensorWeakRef, Numbers]] = {}
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
        # Inference tensors keep no version: a second look could not tell whether they changed.
        if lasting is None or local.is_inference():
            self._pending.append((leaf, self._measure(local)))
            return leaf
        key = _key(local)
        known = self._known(key)
        if known is None:
            known = self._measure(local)
            self._seen[key] = TensorWeakRef(local), known
            if not lasting:
                recent = self._recent
                recent.append(key)
                if len(recent) > _RECENT:
                    self._seen.pop(recent.popleft(), None)
        self._pending.append((leaf, known))
        return leaf

    def _known(self, key: Any) -> Numbers | None:
        """The numbers of a tensor that was measured and has not changed since."""
        found = self._seen.get(key)
        if found is None:
            return None
        owner = found[0]()
        # A tensor that is gone may have left its address to another. FSDP frees the storage of a
        # parameter it reshards and fills it again without a new version: the old address may be
        # another parameter's by now.
        if owner is None or owner.data_ptr() != key[0] or owner._version != key[1]:
            return None
        return found[1]

    def measured(self, tensor: Tensor) -> Numbers | None:
        """The numbers of a tensor that was measured just before, at least in fp32.

        None where it was not, or where its numbers are rounded to a shorter format.
        """
        _, local, _ = _unpack(tensor)
        if local.dtype not in (torch.float32, torch.float64) or local.is_inference():
            return None
        known = self._known(_key(local))
        return known if known is not None and known.full else None

    def forget(self) -> None:
        """Drop what is remembered of tensors (after an optimizer step, at the end of a stage)."""
        self._seen.clear()
        self._recent.clear()

    def _measure(self, x: Tensor) -> Numbers:
        if onepass.takes(x) and self._large.add(x):
            return self._read(self._of_large)
        if x.dim() and small.takes(x):
            self._small.add(x)
            return self._read(self._of_small)
        numbers = self._by_torch(x)
        self._measured.append(numbers)
        return numbers

    def _read(self, among: list[Numbers]) -> Numbers:
        """Numbers of the tensor that was read last, which it will have when all are made."""
        numbers = Numbers("full", None, 0 if self._with_sketch else -1)
        among.append(numbers)
        return numbers

    def _by_torch(self, x: Tensor) -> Numbers:
        if x.requires_grad:
            x = x.detach()
        dtype = x.dtype
        sketched = self._with_sketch
        column = self._columns[dtype]
        if x.dim() == 0 and not dtype.is_complex and dtype != torch.bool:
            # the value itself needs no sketch
            return Numbers("same", (dtype, column.add(x.clone())), -1)
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
        return Numbers(kind, (dtype, row), self._add_sketch(x) if sketched else -1)

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
        for numbers in self._measured:
            numbers.read(values, sketches)
        for found, of in (
            (self._large.found(), self._of_large),
            (self._small.found(), self._of_small),
        ):
            encoded: list[str | None] = [None] * len(found)
            if self._with_sketch and found:
                blocks = [one.sketch for one in found if one.sketch is not None]
                encoded = _encoded(np.stack(blocks))
            for numbers, reading, sketched in zip(of, found, encoded, strict=True):
                numbers.take(reading, sketched)
        for reader in self.readers:
            reader()
        for leaf, numbers in self._pending:
            numbers.fill(leaf)
        filled = len(self._pending)
        self._reset()
        return filled


def _key(tensor: Tensor) -> Any:
    """What two tensors of the same numbers in the same order have alike, where they lie."""
    # numbers in a row are the same whatever shape they are given
    lie = tensor.numel() if tensor.is_contiguous() else (tensor.shape, tensor.stride())
    return tensor.data_ptr(), tensor._version, lie, tensor.dtype


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


def _encoded(block: npt.NDArray[np.float32]) -> list[str | None]:
    # A tensor with NaN, Inf or overflowing sums has no sketch that means anything.
    finite = np.logical_and.reduce(np.isfinite(block), axis=1)
    return [
        sketch_definition.encode(row) if good else None
        for row, good in zip(block, finite, strict=True)
    ]
