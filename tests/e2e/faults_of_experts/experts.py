"""Faults of experts that are planted in every layout, whatever the layout's modules are called.

transformers runs all experts of a layer in one module, Megatron each in its own; a fault of one is
found at that module or, where the other side has all in one, at their container.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlprobe.capture.names import named_modules
from rlprobe.selftest import fault

LOG_PROB, ACTOR = "actor_compute_log_prob", "actor_update"
LAYER = "model.layers.2.mlp"
GATE, EXPERTS = f"{LAYER}.gate", f"{LAYER}.experts"
#: It is on the second of two expert-parallel ranks.
EXPERT = 5


def _modules(site: Any) -> dict[str, Any]:
    models = list(site.model) if isinstance(site.model, list) else [site.model]
    return {path: module for _, path, module in named_modules(models)}


@fault(stage=LOG_PROB, module=GATE, cause=("routing", "constant_factor"))
def router_weights(site: Any) -> Iterator[None]:
    """What the chosen experts say counts more."""

    def hook(module: Any, args: Any, output: Any) -> Any:
        if output[-1].dtype == torch.bool:
            return output[0] * 1.02, output[1]
        return output[0], output[1] * 1.02, output[2]

    handle = _modules(site)[GATE].register_forward_hook(hook)
    yield
    handle.remove()


@fault(stage=LOG_PROB, module=GATE, cause="routing")
def router_choice(site: Any) -> Iterator[None]:
    """Every fourth token is sent to the experts next to its own."""

    def hook(module: Any, args: Any, output: Any) -> Any:
        *first, chosen = output
        odd = (torch.arange(len(chosen)) % 4 == 0).unsqueeze(1)
        if chosen.dtype == torch.bool:
            moved = chosen.roll(1, dims=1)
            weights = torch.where(odd, first[0].roll(1, dims=1), first[0])
            return weights, torch.where(odd, moved, chosen)
        return *first, torch.where(odd, (chosen + 1) % first[0].shape[1], chosen)

    handle = _modules(site)[GATE].register_forward_hook(hook)
    yield
    handle.remove()


@fault(stage=LOG_PROB, module=f"{EXPERTS}.{EXPERT}.down_proj", cause="constant_factor")
def expert_output(site: Any) -> Iterator[None]:
    """One expert's last projection gives more."""
    modules = _modules(site)
    own = modules.get(f"{EXPERTS}.{EXPERT}.down_proj")
    handles = []
    if own is not None:
        handles.append(
            own.register_forward_hook(
                lambda module, args, output: (
                    (output[0] * 1.05, *output[1:]) if isinstance(output, tuple) else output * 1.05
                )
            )
        )
    elif hasattr(modules[EXPERTS], "gate_up_proj"):

        def before(module: Any, args: Any) -> Any:
            hidden, chosen, weights = args
            return hidden, chosen, weights * torch.where(chosen == EXPERT, 1.05, 1.0)

        handles.append(modules[EXPERTS].register_forward_pre_hook(before))
    yield
    for handle in handles:
        handle.remove()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.05


@fault(stage=ACTOR, module=EXPERTS, cause="constant_factor")
def sent_to_experts(site: Any) -> Iterator[None]:
    """The gradient that all experts of a layer are sent is too large."""
    modules = _modules(site)
    layer, experts = modules[LAYER], modules[EXPERTS]
    dispatcher = getattr(layer, "token_dispatcher", None)
    if dispatcher is None:
        handle = experts.register_forward_hook(lambda module, args, output: _Scaled.apply(output))
        yield
        handle.remove()
        return
    right = dispatcher.combine_postprocess
    dispatcher.combine_postprocess = lambda hidden: _Scaled.apply(right(hidden))
    yield
    dispatcher.combine_postprocess = right
