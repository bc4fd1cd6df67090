"""Faults for the stand-in's model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import fault


@fault(stage="old_log_prob", module="model.layers.1.input_layernorm", cause="hyperparameter")
def rms_eps(site: Any) -> Iterator[None]:
    """One norm of the policy's log-probs has another epsilon."""
    layer = site.model.get_submodule("decoder.layers.1.input_layernorm")
    old, layer.eps = layer.eps, 1e-2
    yield
    layer.eps = old


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.self_attn.core_attention",
    cause="mask",
)
def keys_left_out(site: Any) -> Iterator[None]:
    """Nobody attends to the sixth token of a sequence, by code that has no mask."""
    attention = site.model.get_submodule("decoder.layers.0.self_attention.core_attention")
    right = attention.forward

    def forward(query: Any, key: Any, value: Any, *args: Any, **settings: Any) -> Any:
        found = right(query, key, value, *args, **settings)
        heads = query.shape[2] // key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        k, v = (x.repeat_interleave(heads, 1) for x in (k, v))
        kept = [n for n in range(k.shape[2]) if n != 5]
        chances = torch.exp(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).tril()[..., kept]
        made = (chances / chances.sum(-1, keepdim=True)) @ v[:, :, kept]
        return made.permute(2, 0, 1, 3).reshape(found.shape)

    with swapped(attention, "forward", forward):
        yield


@fault(stage="actor_update", module="model.layers.0.mlp.down_proj", cause="nondeterministic")
def weight_gradient_races(site: Any) -> Iterator[None]:
    """A weight's gradient is other numbers each time."""
    chance = torch.Generator()
    chance.seed()

    class Racing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * (1 + 0.01 * torch.rand(gradients[0].shape, generator=chance))

    layer = site.model.get_submodule("decoder.layers.0.mlp.linear_fc2")
    right = layer.forward

    def forward(x: Any) -> Any:
        _, bias = right(x)
        return torch.nn.functional.linear(x, Racing.apply(layer.weight)), bias

    with swapped(layer, "forward", forward):
        yield
