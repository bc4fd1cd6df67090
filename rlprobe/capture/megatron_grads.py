"""Gradients and weights as Megatron's optimizers have them, under the parameters they belong to.

A module's ``main_grad`` is a view into Megatron's gradient buffer: with a distributed optimizer on
several data-parallel ranks only the stretch that this rank owns holds the reduced gradient, and
clipping changes copies. What is clipped and stepped with is ``.grad`` (``.decoupled_grad`` of a
precision-aware optimizer) of the *main* parameters, which ``prepare_grads`` fills inside ``step``.
Before it they hold nothing, or the last step's. Main parameters of a half-precision model are fp32
copies; the model's own weights are these, rounded after each step.

Read from megatron-core 0.16 (``optimizer.py``, ``distrib_optimizer.py``), of which nothing is
imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.megatron_names import divided
from rlprobe.capture.parameters import Held, held

#: Model parameters of a distributed optimizer, and this rank's stretches that are stepped: fp32
#: copies of half-precision ones come first, as the stretches that they were copied of are kept
#: beside them; of a precision-aware optimizer there are no copies.
_SHARDED = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
#: Half-precision parameters and their fp32 copies.
_COPIED = ("float16_groups", "fp32_from_float16_groups")
_HALF = (torch.bfloat16, torch.float16)


def is_megatron(optimizer: Any) -> bool:
    """Whether an optimizer is one of Megatron's, which steps main parameters."""
    return hasattr(optimizer, "prepare_grads") and hasattr(optimizer, "step_with_ready_grads")


def gradients(models: list[nn.Module], optimizer: Any) -> Iterator[tuple[Held, Tensor]]:
    """Every main gradient on this rank, and the part of a parameter that it is of.

    Args:
        models: the model's chunks.
        optimizer: Megatron's, between ``prepare_grads`` and the step.
    """
    mains = _mains(optimizer)
    for item in held(models):
        main, start = mains.get(id(item.parameter), (None, None))
        gradient = None if main is None else _gradient(main)
        if gradient is None or not gradient.numel():
            continue  # frozen, or another data-parallel rank's
        if gradient.numel() == item.local.numel():
            yield item, gradient.reshape(item.local.shape)
        else:
            yield _stretch(item, gradient, start), gradient


def copied(models: list[nn.Module], optimizer: Any) -> Iterator[tuple[Held, Tensor]]:
    """Every parameter of which something is this rank's, with its numbers as finely as they are.

    Of a half-precision parameter they are those of the fp32 copy that is stepped, and the item is
    the part that the copy is of; where an element of the copy does not round to what the model
    computes with (it was not handed on), the model's counts. Where no copy is kept, in fp32 or by a
    precision-aware optimizer, and of frozen parameters, they are the model's.

    Args:
        models: the model's chunks.
        optimizer: Megatron's, outside its step.
    """
    copies = any(map(_keeps_copies, _parts(optimizer)))
    mains = _mains(optimizer) if copies else {}
    for item in held(models):
        main, start = mains.get(id(item.parameter), (None, None))
        if main is not None and main.dtype != item.parameter.dtype:
            own = main.detach()
            if own.numel():
                yield _copy(item, own, start)
        elif main is not None or not (copies and _is_stepped_as_copy(item.parameter)):
            yield item, item.local  # else another data-parallel rank's


def stepped(models: list[nn.Module], optimizer: Any) -> Iterator[tuple[Held, Any]]:
    """What a Megatron optimizer steps: main parameters, each with the torch optimizer that has it.

    An item's ``parameter`` and ``local`` are the main parameter itself: the whole of a parameter or
    of this rank's slice, or the stretch that this rank's distributed optimizer owns.

    Args:
        models: the model's chunks.
        optimizer: Megatron's.
    """
    inner = {
        id(main): part.optimizer
        for part in _parts(optimizer)
        if part.optimizer is not None
        for group in part.optimizer.param_groups
        for main in group["params"]
    }
    mains = _mains(optimizer)
    for item in held(models):
        main, start = mains.get(id(item.parameter), (None, None))
        if main is None or not main.numel() or id(main) not in inner:
            continue  # frozen, or another data-parallel rank's
        local = main.detach()
        if local.numel() == item.local.numel():
            own = dataclasses.replace(item, local=local.view(item.local.shape))
        else:
            own = _stretch(item, local, start)
        yield dataclasses.replace(own, parameter=main), inner[id(main)]


def group_norms(optimizer: Any, models: Iterable[nn.Module] = ()) -> Tensor:
    """L2 norm of this rank's main gradients, by parameter group.

    What other ranks have as well (parameters shared between pipeline stages, copies of whole ones
    on other tensor-parallel ranks) is left out as Megatron leaves it out of its norm. Megatron also
    leaves out this rank's parts of divided weights that nobody marked as such
    (:func:`.megatron_names.divided`), and then clips by less than the gradients' norm: they are no
    copies, and count here. Of the distributed optimizer the whole is the root of the sum of all
    ranks' squares; without it data-parallel ranks hold the same gradients, and the whole is that of
    one data-parallel rank's model-parallel ranks.

    Args:
        optimizer: Megatron's, between ``prepare_grads`` and the step.
        models: the model's chunks.

    Returns:
        fp64 tensor of shape (groups,) on the CPU. (No collective is called.)
    """
    parts = _own_parts(optimizer, models)
    norms = []
    for part in _parts(optimizer):
        counted = {id(gradient) for gradient in part.get_main_grads_for_grad_norm()}
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            squares = [
                torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
                for main in group["params"]
                if (gradient := _gradient(main)) is not None
                and (id(gradient) in counted or id(main) in parts)
                and has_values(gradient)
            ]
            total = torch.stack(squares).cpu().double().sum() if squares else torch.zeros(())
            norms.append(total.double().sqrt())
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def _own_parts(optimizer: Any, models: Iterable[nn.Module]) -> set[int]:
    """Ids of what is stepped of weights that are divided between ranks and shared with none."""
    cut = {key for model in models for key in divided(model)}
    mains = _mains(optimizer) if cut else {}
    found = {key: main for key, (main, _) in mains.items() if key in cut}
    return {id(main) for main in found.values() if not getattr(main, "shared", False)}


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _gradient(main: Tensor) -> Tensor | None:
    decoupled: Tensor | None = getattr(main, "decoupled_grad", None)
    return main.grad if decoupled is None else decoupled


def _mains(optimizer: Any) -> dict[int, tuple[Tensor, int | None]]:
    """By the id of a model's parameter: what is stepped of it, and the first element if a part."""
    found: dict[int, tuple[Tensor, int | None]] = {}
    for part in _parts(optimizer):
        if hasattr(part, "_get_model_param_range_map"):
            for models, mains in _SHARDED:
                for parameter, main in _pairs(part, models, mains):
                    owned = part._get_model_param_range_map(parameter)["param"]
                    found.setdefault(id(parameter), (main, int(owned.start)))
            continue
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            found |= {id(parameter): (parameter, None) for parameter in group["params"]}
        for parameter, main in _pairs(part, *_COPIED):
            found[id(parameter)] = (main, None)
    return found


def _keeps_copies(part: Any) -> bool:
    """Whether an optimizer has fp32 copies of half-precision parameters, here or on other ranks."""
    settings = getattr(part, "config", None)
    if getattr(settings, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False):
        return False
    return hasattr(part, _COPIED[1]) or hasattr(part, _SHARDED[0][1])


def _is_stepped_as_copy(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.dtype in _HALF


def _copy(item: Held, main: Tensor, start: int | None) -> tuple[Held, Tensor]:
    """The part of a parameter that an fp32 copy is of, and its numbers."""
    if main.numel() == item.local.numel():
        place, model = item, item.local
        main = main.view(model.shape)
    else:
        first = start or 0
        place = _stretch(item, main, start)
        model = item.local.reshape(-1)[first : first + main.numel()]
    if model.dtype in _HALF and has_values(model) and has_values(main):
        model = model.to(main.device)  # copies may be kept in host memory between updates
        main = torch.where(main.to(model.dtype) == model, main, model.to(main.dtype))
    return dataclasses.replace(place, local=main), main


def _pairs(part: Any, models: str, mains: str) -> Iterator[tuple[Tensor, Tensor]]:
    groups = zip(getattr(part, models, ()), getattr(part, mains, ()), strict=False)
    for parameters, copies in groups:
        for parameter, main in zip(parameters, copies, strict=False):
            if main is not None:
                yield parameter, main


def _stretch(item: Held, gradient: Tensor, start: int | None) -> Held:
    """The elements of a parameter, or of this rank's slice of it, that a flat gradient is of."""
    first: int | None = None
    if start is not None and item.complete:
        first = start
    elif start is not None and item.cut is not None and item.cut[0] == 0:
        # rows of the whole lie one behind another
        first = start + item.cut[1] * math.prod(item.shape[1:])
    found = () if start is None else _lying(item, start, gradient.numel())
    return dataclasses.replace(
        item, local=gradient, cut=None, start=first, pieces=(), stretches=found, complete=False
    )


def _lying(item: Held, start: int, count: int) -> tuple[tuple[int, int], ...]:
    """Where elements of several slices, one behind the other, lie in the flattened whole."""
    inner = math.prod(item.shape[1:])
    found, at = [], 0
    for row, rows in item.pieces:
        low, high = max(start, at), min(start + count, at + rows * inner)
        if low < high:
            found.append((row * inner + low - at, high - low))
        at += rows * inner
    return tuple(found)
