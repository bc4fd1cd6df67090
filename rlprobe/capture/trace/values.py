"""Tensors that a trace has seen: which is which, what is in them, and those it did not see made.

A value is a tensor's storage and the view of it, so that an operator in place gives back the value
it was given. Everything seen is held until the trace ends: no address is used twice meanwhile.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprobe import sketch as sketch_definition
from rlprobe.capture.light.sketches import sketch
from rlprobe.capture.light.statistics import has_values

DIRECTORY = "dump_tensor_data"
#: Larger tensors have the digest of their sketch and norm: no gigabytes come to the host.
_WHOLE = 64 << 20
#: Tensors of up to so many elements are written out.
_FEW = 8
#: Significant bits of a format's numbers, and the whole numbers that hold its bits.
_BITS = {torch.float32: (24, torch.int32), torch.float64: (53, torch.int64)}
#: Of shorter formats: bfloat16, float16.
_SHORTER = (8, 11)
_Key = tuple[Any, ...]


def unpacked(tensor: Tensor) -> Tensor:
    """The plain tensor inside a DTensor or a nested one."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.values() if local.is_nested else local


class Values:
    """Numbers values in the order in which they are seen.

    Args:
        directory: of the rank's files; values that no traced operator made go there.
        name: what the names of those files begin with.
        allow: asked for bytes before each such file.
        keeps: whether such files are wanted now.
    """

    def __init__(
        self, directory: Path, name: str, allow: Callable[[int], bool], keeps: Callable[[], bool]
    ) -> None:
        self._keeps = keeps
        self._directory = directory / DIRECTORY
        self._name = name
        self._allow = allow
        self._known: dict[_Key, int] = {}
        self._storages: dict[Any, int] = {}
        self._held: list[Tensor] = []
        self._described: dict[tuple[int, int], dict[str, Any]] = {}
        self._names: dict[_Key, str] = {}
        #: By storage: names that go to every view of these bytes of it. A batch may lie in one
        #: storage whole, so that a storage alone does not tell whose a view is.
        self._owners: dict[Any, list[tuple[int, int, str]]] = {}
        self._entering: set[_Key] = set()
        #: Storages that were reserved: a kernel that no dispatcher sees may write to them.
        self._reserved: set[Any] = set()
        self.left_out = 0

    def call(self, tensor: Tensor, name: str) -> None:
        """Give a value a name before it is seen: an input, a parameter or a buffer."""
        local = unpacked(tensor)
        self._names.setdefault(_key(local), name)
        self._held.append(local)

    def reenter(self, tensor: Tensor, name: str) -> None:
        """Let a value enter anew, under a name, where it is given next: what follows begins there.

        Earlier operators may have made it.
        """
        local = unpacked(tensor)
        self._names[_key(local)] = name
        self._entering.add(_key(local))
        self._held.append(local)

    def reserved(self, tensor: Tensor) -> None:
        """Memory that an operator reserved: what it holds is looked at each time it is given."""
        self._reserved.add(_key(unpacked(tensor))[0])

    def owner(self, tensor: Tensor, name: str) -> None:
        """Name a value and every view of its memory: a batch, of which operators take rows."""
        local = unpacked(tensor)
        self.call(local, name)
        self._owners.setdefault(_key(local)[0], []).append((*_extent(local), name))

    def given(self, tensor: Tensor) -> dict[str, Any]:
        """A value an operator is given; kept where no traced operator made it."""
        return self._describe(tensor, made=False)

    def entered(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """A value that a module within made: it comes from there, and is kept."""
        self.call(tensor, name)
        return self._describe(tensor, made=False)

    def made(self, tensor: Tensor) -> dict[str, Any]:
        """A value an operator made."""
        return self._describe(tensor, made=True)

    def pending(self, tensor: Tensor) -> dict[str, Any]:
        """A value that is being filled: which it is, and nothing of its elements."""
        found = self._describe(tensor, made=True)
        self._described.clear()  # a collective writes without a new version, also through views
        return {name: found[name] for name in ("value", "storage", "dtype", "shape", "stride")}

    def _describe(self, tensor: Tensor, *, made: bool) -> dict[str, Any]:
        local = unpacked(tensor)
        key = _key(local)
        number = self._known.get(key)
        fresh = number is None
        if number is None:
            number = self._known[key] = len(self._known)
            self._held.append(local)
        storage = self._storages.setdefault(key[0], len(self._storages))
        found: dict[str, Any] = {"value": number, "storage": storage}
        if (fresh or key in self._entering) and not made:
            self._entering.discard(key)
            found["from"] = self._names.get(key) or self._owner(local)
            data = self._keep(number, local)
            if data is not None:
                found["data"] = data
        version = -1 if local.is_inference() else local._version
        known = self._described.get((number, version))
        if known is None or version < 0 or made or key[0] in self._reserved:
            known = content(local)
            self._described[number, version] = known
        return {**found, **known}

    def _owner(self, tensor: Tensor) -> str:
        """The name of the least memory with one that all of a view lies in."""
        low, high = _extent(tensor)
        within = [
            (last - first, name)
            for first, last, name in self._owners.get(_key(tensor)[0], ())
            if first <= low and high <= last
        ]
        return min(within, key=lambda found: found[0])[1] if within else "elsewhere"

    def _keep(self, number: int, tensor: Tensor) -> str | None:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            return None
        if not self._keeps():
            return None
        if not self._allow(tensor.numel() * tensor.element_size()):
            self.left_out += 1
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"{self._name}.{number}.pt"
        torch.save(tensor.detach().cpu().clone().contiguous(), self._directory / name)
        return name

    def save(self, tensor: Tensor, name: str) -> str | None:
        """Keep a tensor under a name of its own; None where the budget is spent."""
        local = unpacked(tensor).detach()
        if not self._keeps():
            return None
        if not local.numel() or not self._allow(local.numel() * local.element_size()):
            self.left_out += 1
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        file = f"{self._name}.{name}.pt"
        torch.save(local.cpu().clone().contiguous(), self._directory / file)
        return file

    def forget(self) -> None:
        """Let everything go."""
        self._known.clear()
        self._storages.clear()
        self._held.clear()
        self._described.clear()
        self._names.clear()
        self._owners.clear()
        self._entering.clear()
        self._reserved.clear()


def _key(tensor: Tensor) -> _Key:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in: from, and up to."""
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + (sum((n - 1) * step for n, step in steps) + 1) * size


def content(tensor: Tensor) -> dict[str, Any]:
    """A tensor's dtype, shape and strides, and digest, norm and sketch of its elements."""
    found: dict[str, Any] = {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()) if tensor.layout is torch.strided else None,
    }
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return found
    tensor = tensor.detach()
    if has_values(tensor) and not tensor.dtype.is_complex:
        wide = tensor if tensor.dtype.is_floating_point else tensor.float()
        norm = float(torch.linalg.vector_norm(wide, dtype=_wide(wide)))
        found["norm"] = norm if math.isfinite(norm) else None
        if norm != norm or math.isinf(norm):
            found["nonfinite"] = int((~torch.isfinite(wide)).sum())
        found["max"], found["min"] = (plain(float(x)) for x in (wide.max(), wide.min()))
        row = sketch(tensor).cpu()
        if bool(torch.isfinite(row).all()):
            found["sketch"] = sketch_definition.encode(row.numpy())
    if tensor.numel() * tensor.element_size() <= _WHOLE:
        # a copy: numpy would fix the storage, which FSDP frees and fills again
        raw = tensor.cpu().clone(memory_format=torch.contiguous_format)
        raw = raw.reshape(-1).view(torch.uint8)
        found["digest"] = hashlib.sha256(raw.numpy()).hexdigest()[:32]
    elif "sketch" in found:
        text = f"{found['sketch']}{found['norm']}"
        found["digest"] = "sketch:" + hashlib.sha256(text.encode()).hexdigest()[:32]
    if tensor.numel() <= _FEW and not tensor.dtype.is_complex:
        found["elements"] = [plain(x) for x in tensor.reshape(-1).tolist()]
    if tensor.dtype in _BITS:
        found["bits"] = _bits(tensor)
    return found


def _bits(tensor: Tensor) -> int:
    """The significant bits of the shortest format of which all elements are numbers."""
    own, whole = _BITS[tensor.dtype]
    held = torch.where(torch.isfinite(tensor), tensor, 0).contiguous().view(whole)
    for bits in _SHORTER:
        if not bool((held & ((1 << (own - bits)) - 1)).any()):
            return bits
    return own


def plain(value: Any) -> Any:
    """A number as strict JSON can hold it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
