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

from rlprobe.capture.megatron_names import MegatronNames, shard
from rlprobe.capture.names import parameter_name, unwrap
from rlprobe.capture.sketches import sketch, sketch_shard
from rlprobe.capture.statistics import has_values


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

    def offsets(self) -> dict[str, int] | None:
        """Where the shard begins, for the record; None when whole or unknown."""
        if self.cut is not None:
            return {"dim": self.cut[0], "index": self.cut[1]}
        return None if self.start is None else {"element": self.start}

    def sketch_of(self, tensor: Tensor) -> Tensor | None:
        """Sketch of a tensor laid out as ``local``; None where its place is not known.

        Sketches of all shards then add up to the whole tensor's.
        """
        if not has_values(tensor):
            return None
        if self.cut is not None:
            return sketch_shard(tensor, torch.Size(self.shape), *self.cut)
        if self.start is not None:
            return sketch(tensor, self.start)
        return sketch(tensor) if self.complete else None


def held(models: list[nn.Module]) -> Iterator[Held]:
    """Every parameter of the model (or of its chunks), tied ones once."""
    megatron = MegatronNames.of([unwrap(model)[1] for model in models])
    for index, model in enumerate(models):
        prefix, _ = unwrap(model)
        if megatron is not None:
            for raw, parameter in model.named_parameters():
                name = megatron.parameter(index, parameter_name(raw, prefix))
                yield _tensor_parallel(name, parameter)
            continue
        chunk = f"{index}." if len(models) > 1 else ""
        for raw, parameter in model.named_parameters():
            flat = list(_flat(raw, parameter, prefix))
            if flat:
                for item in flat:
                    yield _renamed(item, chunk)
            else:
                yield _renamed(_single(parameter_name(raw, prefix), parameter), chunk)


def _renamed(item: Held, chunk: str) -> Held:
    if not chunk:
        return item
    return Held(
        chunk + item.name,
        item.parameter,
        item.local,
        item.shape,
        item.cut,
        item.start,
        item.complete,
    )


def _single(name: str, parameter: Tensor) -> Held:
    local = getattr(parameter, "_local_tensor", None)
    if local is None or not hasattr(parameter, "placements"):
        return Held(name, parameter, parameter.detach(), tuple(parameter.shape))
    return _dtensor(name, parameter, local.detach())


def _tensor_parallel(name: str, parameter: Tensor) -> Held:
    """A parameter of Megatron's, whole or this tensor-parallel rank's part of it."""
    part = shard(name, parameter)
    local = parameter.detach()
    if part is None:
        return Held(name, parameter, local, tuple(parameter.shape))
    return Held(name, parameter, local, part.shape, part.cut, None, False)


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


def _flat(raw: str, parameter: Any, prefix: str) -> Iterator[Held]:
    """The original parameters inside an FSDP1 ``FlatParameter`` (use_orig_params=False)."""
    names = getattr(parameter, "_fqns", None)
    shapes = getattr(parameter, "_shapes", None)
    numels = getattr(parameter, "_numels", None)
    if names is None or shapes is None or numels is None:
        return
    base = raw.rsplit("_flat_param", 1)[0]
    flat = parameter.detach().reshape(-1)
    shards = getattr(parameter, "_shard_param_infos", None)
    whole = flat.numel() >= sum(numels)
    position = 0
    for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        full = parameter_name(base + name, prefix)
        count = math.prod(shape)
        if whole:
            # Paddings between parameters stand in _numels without a name; sizes come in order.
            yield Held(full, parameter, flat[position : position + count].view(shape), tuple(shape))
            position += count
            continue
        info = shards[index] if shards is not None else None
        if info is None or not info.in_shard:
            continue
        begin = info.offset_in_shard
        yield Held(
            full,
            parameter,
            flat[begin : begin + info.numel_in_shard],
            tuple(shape),
            None,
            info.intra_param_start_idx,
            False,
        )
