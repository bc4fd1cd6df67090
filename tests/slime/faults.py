"""Faults for the stand-in's model, under the Hugging Face names of what they are of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlprobe.selftest import fault


@fault(stage="old_log_prob", module="model.layers.1.input_layernorm", cause="hyperparameter")
def rms_eps(site: Any) -> Iterator[None]:
    layer = site.model.get_submodule("decoder.layers.1.input_layernorm")
    old, layer.eps = layer.eps, 1e-2
    yield
    layer.eps = old


@fault(stage="ref_compute_log_prob", module="model.layers.0.mlp.up_proj", cause="constant_factor")
def up(site: Any) -> Iterator[None]:
    """The second half of what a rank's fused projection gives."""

    def hook(module: Any, args: Any, output: Any) -> Any:
        gate, own = output[0].chunk(2, -1)
        return torch.cat([gate, own * 1.01], -1), *output[1:]

    layer = site.model.get_submodule("decoder.layers.0.mlp.linear_fc1")
    handle = layer.register_forward_hook(hook)
    yield
    handle.remove()


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.05


@fault(stage="actor_train", module="model.layers.0.mlp.down_proj", cause="constant_factor")
def sent_back(site: Any) -> Iterator[None]:
    """A gradient that a projection is given is a little too large."""
    layer = site.model.get_submodule("decoder.layers.0.mlp.linear_fc2")
    handle = layer.register_forward_hook(
        lambda module, args, output: (_Scaled.apply(output[0]), *output[1:])
    )
    yield
    handle.remove()


@fault(stage="actor_train", cause="hyperparameter")
def rate(site: Any) -> Iterator[None]:
    """Two per cent more than the learning rate that was asked for."""
    parts = getattr(site.optimizer, "chained_optimizers", [site.optimizer])
    groups = [group for part in parts for group in part.param_groups]
    for group in groups:
        group["lr"] *= 1.02
    yield
    for group in groups:
        group["lr"] /= 1.02
