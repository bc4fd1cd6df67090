"""What FSDP1 (``FullyShardedDataParallel``) holds of each original parameter on this rank.

Its flat parameter lays the parameters of a unit end to end and gives each rank a stretch. With
``use_orig_params=True`` a module's parameters are views of what lies in the stretch, of one
dimension or empty; without, only the flat parameter is a parameter. Names of torch's internals
(``_fqns``, ``_shapes``, ``_shard_param_infos``) are those of torch 2.1 to 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Stretch:
    """A part of an original parameter."""

    #: Path of the parameter below the FSDP unit.
    name: str
    #: Shape of the whole.
    shape: tuple[int, ...]
    #: The numbers here; of the whole's shape when whole, else of one dimension.
    local: Tensor
    #: First element of the flattened whole; None when whole.
    start: int | None
    complete: bool


def stretches(flat_parameter: Any) -> Iterator[Stretch]:
    """The original parameters in a flat parameter; none for any other parameter."""
    names = getattr(flat_parameter, "_fqns", None)
    shapes = getattr(flat_parameter, "_shapes", None)
    shards = getattr(flat_parameter, "_shard_param_infos", None)
    if names is None or shapes is None:
        return
    flat = flat_parameter.detach().reshape(-1)
    position = 0
    whole = flat.numel() >= sum(math.prod(shape) for shape in shapes)
    for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        count = math.prod(shape)
        if whole:
            local = flat[position : position + count].view(shape)
            position += count
            yield Stretch(name, tuple(shape), local, None, True)
            continue
        info = None if shards is None else shards[index]
        if info is not None and info.in_shard:
            begin = info.offset_in_shard
            local = flat[begin : begin + info.numel_in_shard]
            yield _placed(name, tuple(shape), local, info.intra_param_start_idx)


def of_view(parameter: Tensor, shape: tuple[int, ...], start: int | None) -> Stretch | None:
    """What a module's own parameter holds, see :func:`views`; None where nothing lies here."""
    local = parameter.detach()
    if start is None or not local.numel():
        return None
    return _placed("", shape, local.reshape(-1), start)


def _placed(name: str, shape: tuple[int, ...], local: Tensor, start: int) -> Stretch:
    # a small parameter may lie on one rank as a whole: it is then no shard
    if local.numel() == math.prod(shape):
        return Stretch(name, shape, local.view(shape), None, True)
    return Stretch(name, shape, local, start, False)


def views(model: nn.Module) -> dict[int, tuple[tuple[int, ...], int | None]]:
    """Shape of the whole and first element here, by identity of the parameters that are views.

    The first element is None where nothing of a parameter lies here. Empty without
    ``use_orig_params=True``.
    """
    found: dict[int, tuple[tuple[int, ...], int | None]] = {}
    for module in model.modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        parameters = getattr(flat, "_params", None)
        if flat is None or parameters is None:
            continue
        for parameter, shape, info in zip(
            parameters, flat._shapes, flat._shard_param_infos, strict=True
        ):
            start = info.intra_param_start_idx if info.in_shard else None
            found[id(parameter)] = (tuple(shape), start)
    return found


def gathered(models: Iterable[nn.Module]) -> dict[int, tuple[str, ...]]:
    """Names of each module's parameters that a flat parameter holds, by identity of the module.

    While a unit computes, each is a view of the flat parameter under that name. The module that
    has the flat parameter is there in any case.
    """
    found: dict[int, tuple[str, ...]] = {}
    for module in (module for model in models for module in model.modules()):
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is None:
            continue
        found.setdefault(id(getattr(module, "_fsdp_wrapped_module", module)), ())
        for name, owner, *_ in (*flat._param_infos, *flat._shared_param_infos):
            found[id(owner)] = (*found.get(id(owner), ()), name)
    return found
