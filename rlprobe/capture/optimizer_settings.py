"""What an optimizer is told as it steps: learning rate, betas, epsilon, decay, by parameter.

Back ends put parameters into groups of their own making; by parameter, what they are told is the
same in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlprobe.capture import megatron_grads
from rlprobe.capture.fused_parameters import FusedParameters
from rlprobe.capture.parameters import Held, held

#: Settings of torch's optimizers, and of those made after them, that say what a step computes. How
#: it is run (foreach, fused, capturable) and what schedules keep beside the rate are none.
SETTINGS = frozenset(
    {"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "momentum", "dampening",
     "nesterov", "alpha", "centered", "rho", "etas", "step_sizes", "lr_decay", "momentum_decay",
     "amsgrad", "maximize", "bias_correction"}
)  # fmt: skip


class OptimizerSettings:
    """The settings that each of a model's parameters is stepped with.

    Which parameter is in which group is looked up once an optimizer: only settings change.

    Args:
        models: the model's chunks.
        optimizer: anything with torch's ``param_groups``; of Megatron's the torch optimizers within
            are looked at.
        by_expert: weights of stacked experts apart.
    """

    def __init__(self, models: list[nn.Module], optimizer: Any, by_expert: bool = False) -> None:
        self._groups: list[tuple[dict[str, Any], list[str]]] = []
        projections = FusedParameters(models, by_expert)
        names: dict[int, dict[str, None]] = {}
        groups: dict[int, dict[str, Any]] = {}
        for item, group in _stepped(models, optimizer):
            groups[id(group)] = group
            own = names.setdefault(id(group), {})
            own |= {part.name: None for part, _ in projections.apart(item, item.local)}
        self._groups = [(group, list(names[key])) for key, group in groups.items()]

    def read(self) -> list[dict[str, Any]]:
        """Groups as they stand: ``settings`` by name and ``names`` of parameters, as JSON."""
        return [
            {
                "settings": {k: _plain(v) for k, v in sorted(group.items()) if k in SETTINGS},
                "names": names,
            }
            for group, names in self._groups
        ]


def _stepped(models: list[nn.Module], optimizer: Any) -> Iterator[tuple[Held, dict[str, Any]]]:
    """What is stepped of every parameter here, and the group that it is stepped in."""
    if megatron_grads.is_megatron(optimizer):
        found = megatron_grads.stepped(models, optimizer)
    else:
        found = ((item, optimizer) for item in held(models))
    known: dict[int, dict[int, dict[str, Any]]] = {}
    for item, inner in found:
        if id(inner) not in known:
            known[id(inner)] = {
                id(parameter): group
                for group in getattr(inner, "param_groups", ())
                for parameter in group["params"]
            }
        group = known[id(inner)].get(id(item.parameter))
        if group is not None:
            yield item, group


def _plain(value: Any) -> Any:
    """A setting as JSON has it: what is not finite, and of no other kind that it knows, as text."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
