"""What single layers do wrong: norms, activations, projections, rotary tables, weights."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, output_of, swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.post_attention_layernorm",
    cause="implementation",
)
def rms_norm_that_centres(site: Site) -> Iterator[None]:
    """The port calls the layer-norm kernel: the mean is taken off before the root mean square."""
    layer = site.model.get_submodule("model.layers.0.post_attention_layernorm")
    right = layer.forward

    def forward(x):
        return right(x - site.strength * x.mean(-1, keepdim=True))

    with swapped(layer, "forward", forward):
        yield


@fault(stage="critic_compute_values", module="model.layers.1.mlp", cause="layout")
def gate_and_up_trade_places(site: Site) -> Iterator[None]:
    """A fused SwiGLU takes its halves in the other order. Swapped or not: no strength between."""
    mlp = site.model.get_submodule("model.layers.1.mlp")

    def forward(x):
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        return mlp.down_proj(mlp.act_fn(up) * gate)

    with swapped(mlp, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn.q_proj",
    cause="constant_factor",
)
def third_query_head_halved(site: Site) -> Iterator[None]:
    """One tile of a matmul is written with another alpha: channels 32 to 47 are halved."""

    def change(y):
        y = y.clone()
        y[..., 32:48] *= 1 - 0.5 * site.strength
        return y

    layer = site.model.get_submodule("model.layers.0.self_attn.q_proj")
    with output_of(layer, change):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.mlp.down_proj",
    cause="nondeterministic",
)
def tiles_sometimes_added_twice(site: Site) -> Iterator[None]:
    """An atomic add races: one element in a hundred is there twice, other ones at each call."""
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))

    def change(y):
        hit = torch.rand(y.shape, generator=generator) < 0.01
        return y * (1 + site.strength * hit)

    layer = site.model.get_submodule("model.layers.1.mlp.down_proj")
    with output_of(layer, change):
        yield


@fault(stage="critic_compute_values", module="model.layers.1.mlp.gate_proj", cause="nonfinite")
def last_tile_never_written(site: Site) -> Iterator[None]:
    """The tail of a grid keeps what was there: NaN in three channels of the last token, or not."""

    def change(y):
        y = y.clone()
        y[:, -1, -3:] = float("nan")
        return y

    layer = site.model.get_submodule("model.layers.1.mlp.gate_proj")
    with output_of(layer, change):
        yield


@fault(stage="reference_compute_log_prob", module="model.rotary_emb", cause="position")
def low_frequencies_stretched(site: Site) -> Iterator[None]:
    """A context extension that the checkpoint does not ask for: all but two frequencies / 4."""
    frequencies = site.model.get_submodule("model.rotary_emb").inv_freq
    old = frequencies.clone()
    frequencies[2:] *= 1 - 0.75 * site.strength
    yield
    frequencies.copy_(old)


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.mlp.up_proj",
    cause="weights",
    verdict="not_comparable",
)
def one_tile_loaded_transposed(site: Site) -> Iterator[None]:
    """A loader forgets to transpose the first of two square blocks of a weight."""
    weight = site.model.get_submodule("model.layers.1.mlp.up_proj").weight
    local = getattr(weight, "_local_tensor", weight).data
    old = local.clone()
    local[:64] = blended(old[:64], old[:64].T, site.strength)
    yield
    local.copy_(old)
