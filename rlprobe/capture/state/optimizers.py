"""State of an optimizer, parameter by parameter, laid out as the parameter is.

Adam and its relatives keep tensors of the parameter's shape (moments) and numbers (steps made).
Settings (learning rate, betas, epsilon, decay) are no state: a replay keeps its own, so that a
wrong one is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlprobe.capture.parameters import Held
from rlprobe.errors import RunError

Numbers = dict[str, float]


def check(optimizer: Any) -> None:
    """Refuse an optimizer whose state is not kept by parameter (Megatron's).

    Raises:
        RunError: it is one.
    """
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise RunError(
            f"controls.rejoin: {type(optimizer).__name__} does not keep its state by parameter, "
            "so that it cannot be kept or taken over; accepted: torch's optimizers"
        )


def state_of(optimizer: Any, item: Held) -> tuple[dict[str, Tensor], Numbers]:
    """What an optimizer keeps of one parameter here: tensors as ``item.local``, and numbers.

    Raises:
        RunError: it keeps something that is neither.
    """
    tensors: dict[str, Tensor] = {}
    numbers: Numbers = {}
    found = {} if optimizer is None else optimizer.state.get(item.parameter, {})
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
    groups = [g for g in optimizer.param_groups if any(p is item.parameter for p in g["params"])]
    beside = any(group.get("fused") or group.get("capturable") for group in groups)
    return torch.tensor(number, dtype=torch.float32, device=item.local.device if beside else "cpu")
