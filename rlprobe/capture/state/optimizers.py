"""State of an optimizer, parameter by parameter, laid out as the parameter is.

Adam and its relatives keep tensors of the parameter's shape (moments) and numbers (steps made;
fused ones count them once for a group). Megatron's optimizers step main parameters, of which the
model's own are copies in its format. Settings (learning rate, betas, epsilon, decay) are no state:
a replay keeps its own, so that a wrong one is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture import megatron_grads
from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.parameters import Held, held
from rlprobe.errors import RunError

Numbers = dict[str, float]
#: How many steps were made; the one number that some optimizers keep for a group.
_STEP = "step"
#: What Transformer Engine's Adam calls its copies of weights.
_MASTERS = "master_param"


def trained(models: list[nn.Module]) -> Iterator[Held]:
    """Parameters that training changes, as the model on this rank holds them.

    Raises:
        RunError: the numbers of one are not there now.
    """
    for item in held(models):
        if not item.parameter.requires_grad:
            continue
        if not has_values(item.local):
            raise RunError(
                f"controls.rejoin: the numbers of {item.name} are elsewhere when the stage begins; "
                "leave parameters on the device (param_offload: false)"
            )
        yield item


def stepped(models: list[nn.Module], optimizer: Any) -> Iterator[tuple[Held, Any]]:
    """What an optimizer steps here, each with the torch optimizer that keeps its state.

    Raises:
        RunError: it does not keep state by parameter, or numbers are not there now.
    """
    if megatron_grads.is_megatron(optimizer):
        for item, inner in megatron_grads.stepped(models, optimizer):
            _require_state(inner)
            yield item, inner
        return
    _require_state(optimizer)
    for item in trained(models):
        yield item, optimizer


def copies(models: list[nn.Module], optimizer: Any) -> Iterator[Held]:
    """Parameters of the model that are copies of what the optimizer steps (Megatron's)."""
    if megatron_grads.is_megatron(optimizer):
        yield from trained(models)


def name(optimizer: Any) -> str:
    """Class of an optimizer; of Megatron's also that of the one within."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = getattr(parts[0], "optimizer", None) if parts else None
    own = type(parts[0] if parts else optimizer).__name__
    return own if inner is None else f"{own}({type(inner).__name__})"


def _require_state(optimizer: Any) -> None:
    if not isinstance(getattr(optimizer, "state", None), Mapping):
        raise RunError(
            f"controls.rejoin: {type(optimizer).__name__} does not keep its state by parameter, "
            "so that it cannot be kept or taken over; accepted: torch's optimizers, and Megatron's "
            "around one"
        )
    if _in_a_form_of_its_own(optimizer):
        raise RunError(
            f"controls.rejoin: {type(optimizer).__name__} keeps copies of weights to itself, or "
            "moments in 16 or 8 bits with factors apart (a precision-aware optimizer), so that its "
            "state cannot be kept or taken over; set use_precision_aware_optimizer to false on "
            "both sides, or controls.rejoin to false"
        )


def _in_a_form_of_its_own(optimizer: Any) -> bool:
    """Whether tensors of the state are not the numbers that are stepped with.

    Transformer Engine's Adam keeps fp32 weights whole or as the bits that bf16 lacks, and divides
    what it keeps in fewer bits by factors that are no part of the state.
    """
    formats = getattr(optimizer, "name_to_dtype_map", None)
    if not isinstance(formats, Mapping):
        return False
    masters = bool(getattr(optimizer, "master_weights", False))
    moments = {form for name, form in formats.items() if name != _MASTERS}
    return masters or moments != {torch.float32}


def state_of(optimizer: Any, item: Held) -> tuple[dict[str, Tensor], Numbers]:
    """What an optimizer keeps of one parameter here: tensors as ``item.local``, and numbers.

    Raises:
        RunError: it keeps something that is neither.
    """
    tensors: dict[str, Tensor] = {}
    numbers: Numbers = {}
    found = optimizer.state.get(item.parameter, {})
    if found and _STEP in (group := _group(optimizer, item)):
        numbers[_STEP] = float(group[_STEP])
    for key, value in found.items():
        tensor = value if isinstance(value, Tensor) else None
        if isinstance(value, bool | int | float) or (tensor is not None and not tensor.dim()):
            numbers[key] = float(value)
        else:
            own = None if tensor is None else item.part_of(tensor)
            if own is None:
                raise RunError(
                    f"controls.rejoin: {type(optimizer).__name__} keeps {key!r} of {item.name} in "
                    "a form that is neither a number nor laid out as the parameter; it cannot be "
                    "kept or taken over"
                )
            tensors[key] = own
    return tensors, numbers


def take_over(
    optimizer: Any, item: Held, tensors: Mapping[str, Tensor], numbers: Numbers
) -> list[str]:
    """Put a parameter's state in place of what the optimizer has.

    Args:
        optimizer: torch's, or one like it.
        item: the parameter, or what this rank holds of it.
        tensors: laid out as ``item.local``, by key.
        numbers: the others.

    Returns:
        Keys whose values this optimizer's formats cannot hold.

    Raises:
        RunError: the optimizer keeps other things of a parameter than those.
    """
    wanted = set(tensors) | set(numbers)
    if not wanted:
        optimizer.state.pop(item.parameter, None)  # the benchmark had made no step with it
        return []
    state = optimizer.state[item.parameter]
    group = _group(optimizer, item)
    if _STEP in group and _STEP in numbers:
        group[_STEP] = type(group[_STEP])(numbers[_STEP])
        numbers = {key: number for key, number in numbers.items() if key != _STEP}
        wanted.discard(_STEP)
    if state and set(state) != wanted:
        raise RunError(
            f"controls.rejoin: of {item.name} the benchmark's optimizer keeps "
            f"{', '.join(sorted(wanted))}, this one ({type(optimizer).__name__}) "
            f"{', '.join(sorted(state))}: it cannot take that over"
        )
    rounded = []
    for key, value in tensors.items():
        if key not in state:
            state[key] = torch.zeros_like(item.parameter, requires_grad=False)
        own = item.part_of(state[key])
        if own is None or not copied(own, value):
            rounded.append(key)
    for key, number in numbers.items():
        if isinstance(state.get(key), Tensor):
            state[key].fill_(number)
        elif key in state:
            state[key] = type(state[key])(number)
        else:
            state[key] = _counter(optimizer, item, number)
    return rounded


def copied(into: Tensor, value: Tensor) -> bool:
    """Copy a tensor; whether nothing of it was rounded away."""
    with torch.no_grad():
        into.copy_(value.reshape(into.shape))
    if into.dtype == value.dtype:
        return True
    return torch.equal(into.to(device=value.device, dtype=value.dtype), value.reshape(into.shape))


def _counter(optimizer: Any, item: Held, number: float) -> Tensor:
    """A count of steps as torch's optimizers make it: fused and captured ones keep it aside."""
    group = _group(optimizer, item)
    beside = group.get("fused") or group.get("capturable")
    return torch.tensor(number, dtype=torch.float32, device=item.local.device if beside else "cpu")


def _group(optimizer: Any, item: Held) -> dict[str, Any]:
    """The settings that a parameter is stepped with."""
    for group in optimizer.param_groups:
        if any(parameter is item.parameter for parameter in group["params"]):
            found: dict[str, Any] = group
            return found
    return {}
