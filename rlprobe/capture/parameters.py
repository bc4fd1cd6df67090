"""Parameters of a model as this rank holds them, under their Hugging Face names.

A parameter may be whole (no sharding, or a mesh of one), a slice along one dimension (FSDP2 and
tensor parallelism: DTensor), or a stretch of the flattened whole (FSDP1's flat parameter). No
collective is ever called: other ranks may not be capturing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture import fsdp1
from rlprobe.capture.light.sketches import sketch, sketch_shard
from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.megatron_names import MegatronNames, divided, shard
from rlprobe.capture.names import parameter_name, unwrap


@dataclass(frozen=True)
class Held:
    """One parameter, or what this rank holds of it."""

    #: Hugging Face path without wrappers.
    name: str
    #: The module's parameter object (its ``.grad`` is the gradient).
    parameter: Tensor
    #: The numbers on this rank, detached; shares storage with the parameter.
    local: Tensor
    #: Shape of the whole.
    shape: tuple[int, ...]
    #: ``(dimension, first index)`` of a slice; None when whole, flat or unknown.
    cut: tuple[int, int] | None = None
    #: First element of a stretch of the flattened whole; None when whole, a slice or unknown.
    start: int | None = None
    #: Whether ``local`` is the whole parameter.
    complete: bool = True
    #: Rows of the whole, ``(first, how many)``, where ``local`` is several slices of it.
    pieces: tuple[tuple[int, int], ...] = ()
    #: Elements of the flattened whole, ``(first, how many)``, where ``local`` is several stretches.
    stretches: tuple[tuple[int, int], ...] = ()
    #: Whether the numbers are the parameter's to the last bit, so that a digest says something.
    exact: bool = True

    def offsets(self) -> dict[str, Any] | None:
        """Where the shard begins, for the record; None when whole or unknown."""
        if self.cut is not None:
            return {"dim": self.cut[0], "index": self.cut[1]}
        if self.pieces:
            return {"dim": 0, "pieces": [list(piece) for piece in self.pieces]}
        if self.stretches:
            return {"stretches": [list(stretch) for stretch in self.stretches]}
        return None if self.start is None else {"element": self.start}

    def part_of(self, tensor: Tensor) -> Tensor | None:
        """What belongs to ``local`` of a tensor that is laid out as the parameter; None: it is not.

        A gradient, or an optimizer's moment. Shares storage with the tensor.
        """
        own = getattr(tensor, "_local_tensor", tensor).detach()
        if own.shape == self.local.shape:
            return own
        if self.local.data_ptr() and own.numel() == self.parameter.numel():
            # a view into FSDP1's flat parameter: the tensor has the flat layout too
            size = self.parameter.element_size()
            begin = (self.local.data_ptr() - self.parameter.data_ptr()) // size
            count = math.prod(self.local.shape)
            return own.reshape(-1)[begin : begin + count].view(self.local.shape)
        return None

    def sketch_of(self, tensor: Tensor) -> Tensor | None:
        """Sketch of a tensor laid out as ``local``; None where its place is not known.

        Sketches of all shards then add up to the whole tensor's.
        """
        if not has_values(tensor):
            return None
        if self.cut is not None:
            return sketch_shard(tensor, torch.Size(self.shape), *self.cut)
        if self.pieces:
            rows = tensor.split([count for _, count in self.pieces])
            places = [first * math.prod(self.shape[1:]) for first, _ in self.pieces]
            parts = [sketch(part, place) for part, place in zip(rows, places, strict=True)]
            return torch.stack(parts).sum(dim=0)
        if self.stretches:
            parts = tensor.reshape(-1).split([count for _, count in self.stretches])
            found = zip(parts, self.stretches, strict=True)
            return torch.stack([sketch(part, first) for part, (first, _) in found]).sum(dim=0)
        if self.start is not None:
            return sketch(tensor, self.start)
        return sketch(tensor) if self.complete else None


def held(models: list[nn.Module]) -> Iterator[Held]:
    """Every parameter of which something lies on this rank, tied ones once.

    Args:
        models: the model, or its chunks.
    """
    megatron = MegatronNames.of([unwrap(model)[1] for model in models])
    for index, model in enumerate(models):
        prefix, _ = unwrap(model)
        if megatron is not None:
            cut = divided(model)
            for raw, parameter in model.named_parameters():
                name = megatron.parameter(index, parameter_name(raw, prefix))
                yield _tensor_parallel(name, parameter, megatron.gated, cut.get(id(parameter)))
            continue
        chunk = f"{index}." if len(models) > 1 else ""
        views = fsdp1.views(model)
        for raw, parameter in model.named_parameters():
            name = chunk + parameter_name(raw, prefix)
            base = raw.rpartition("_flat_param")[0]
            parts = list(fsdp1.stretches(parameter))
            for part in parts:
                yield _stretch(chunk + parameter_name(base + part.name, prefix), parameter, part)
            if parts:
                continue
            view = views.get(id(parameter))
            if view is not None and tuple(parameter.shape) != view[0]:
                lying = fsdp1.of_view(parameter, *view)
                if lying is not None:
                    yield _stretch(name, parameter, lying)
                continue
            item = _single(name, parameter)
            # more ranks than rows: nothing of it lies here
            if item.local.numel() or not math.prod(item.shape):
                yield item


def _stretch(name: str, parameter: Tensor, part: fsdp1.Stretch) -> Held:
    return Held(name, parameter, part.local, part.shape, None, part.start, part.complete)


def _single(name: str, parameter: Tensor) -> Held:
    local = getattr(parameter, "_local_tensor", None)
    if local is None or not hasattr(parameter, "placements"):
        return Held(name, parameter, parameter.detach(), tuple(parameter.shape))
    return _dtensor(name, parameter, local.detach())


def _tensor_parallel(name: str, parameter: Tensor, gated: bool, dim: int | None = None) -> Held:
    """A parameter of Megatron's, whole or this tensor-parallel rank's part of it."""
    part = shard(name, parameter, gated, dim)
    local = parameter.detach()
    if part is None:
        return Held(name, parameter, local, tuple(parameter.shape))
    return Held(name, parameter, local, part.shape, part.cut, None, False, part.pieces)


def _dtensor(name: str, parameter: Any, local: Tensor) -> Held:
    shape = tuple(parameter.shape)
    if tuple(local.shape) == shape and not any(p.is_partial() for p in parameter.placements):
        return Held(name, parameter, local, shape)
    cut = _slice_of(parameter, local)
    return Held(name, parameter, local, shape, cut, None, False)


def _slice_of(parameter: Any, local: Tensor) -> tuple[int, int] | None:
    """Dimension and first index of a DTensor sharded along one mesh dimension, else None."""
    sharded = [(i, p) for i, p in enumerate(parameter.placements) if not p.is_replicate()]
    if len(sharded) != 1 or type(sharded[0][1]).__name__ != "Shard":
        return None  # several mesh dimensions, strided or partial: the place is not one slice
    mesh_dim, placement = sharded[0]
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    dim = placement.dim % len(parameter.shape)
    # torch.chunk's rule, by which DTensor cuts: equal parts of ceil(n / ranks), the rest shorter.
    part = math.ceil(parameter.shape[dim] / mesh.size(mesh_dim))
    start = min(part * coordinate[mesh_dim], parameter.shape[dim])
    if local.shape[dim] != min(part, parameter.shape[dim] - start):
        return None
    return dim, start
