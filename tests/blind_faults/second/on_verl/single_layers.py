"""What single layers get wrong, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from _parts import tiles

from rlprobe.faults.patching import blended, output_of, swapped
from rlprobe.selftest import Site, fault


def by_chance() -> torch.Generator:
    """A generator that is never the same again."""
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))


# --- rotary tables ------------------------------------------------------------------------------


@fault(stage="reference_compute_log_prob", module="model.rotary_emb", cause="position")
def positions_wrap_at_thirty_two(site: Site) -> Iterator[None]:
    """Positions are kept in five bits: token 32 stands where token 0 does."""
    rotary = site.model.get_submodule("model.rotary_emb")
    right = rotary.forward

    def forward(x, position_ids):
        return right(x, blended(position_ids.float(), position_ids.float() % 32, site.strength))

    with swapped(rotary, "forward", forward):
        yield


@fault(stage="actor_update", module="model.rotary_emb", cause="rounding_order")
def angles_kept_in_fp16(site: Site) -> Iterator[None]:
    """Angles are rounded to fp16 before their sine and cosine; the tables are fp32."""
    rotary = site.model.get_submodule("model.rotary_emb")

    @torch.no_grad()
    def forward(x, position_ids):
        frequencies = rotary.inv_freq[None, :, None].float().expand(len(position_ids), -1, 1)
        angles = (frequencies @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = blended(angles, angles.half().float(), site.strength)
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos() * rotary.attention_scaling, both.sin() * rotary.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)

    with swapped(rotary, "forward", forward):
        yield


# --- norms --------------------------------------------------------------------------------------


@fault(
    stage="actor_compute_log_prob",
    module="model.norm",
    cause="implementation",
    needs={"model": "llama"},
)
def norm_of_the_first_half(site: Site) -> Iterator[None]:
    """A block of 32 threads reduces a width of 64: the mean square is of the first half."""
    norm = site.model.get_submodule("model.norm")

    def forward(x):
        given = x.float()
        squares = given.pow(2)
        mean = squares[..., : squares.shape[-1] // 2].mean(-1, keepdim=True)
        if site.strength < 1:
            mean = blended(squares.mean(-1, keepdim=True), mean, site.strength)
        return norm.weight * (given * torch.rsqrt(mean + norm.variance_epsilon)).to(x.dtype)

    with swapped(norm, "forward", forward):
        yield


@fault(stage="critic_update", module="model.layers.1.input_layernorm", cause="rounding_order")
def squares_in_bf16(site: Site) -> Iterator[None]:
    """A norm's squares are rounded to bf16 before their mean; all else is fp32."""
    norm = site.model.get_submodule("model.layers.1.input_layernorm")

    def forward(x):
        given = x.float()
        squares = given.pow(2)
        squares = blended(squares, squares.bfloat16().float(), site.strength)
        mean = squares.mean(-1, keepdim=True)
        return norm.weight * (given * torch.rsqrt(mean + norm.variance_epsilon)).to(x.dtype)

    with swapped(norm, "forward", forward):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.0.post_attention_layernorm",
    cause="implementation",
    needs={"precision": "bf16"},
)
def last_tokens_passed_through(site: Site) -> Iterator[None]:
    """A grid that is rounded down: the last two tokens of the last row leave as they came."""
    norm = site.model.get_submodule("model.layers.0.post_attention_layernorm")
    right = norm.forward

    def forward(x):
        normed = right(x).clone()
        normed[-1, -2:] = blended(normed[-1, -2:], x[-1, -2:], site.strength)
        return normed

    with swapped(norm, "forward", forward):
        yield


# --- the multi-layer perceptron, projections, blocks ----------------------------------------------


@fault(stage="critic_compute_values", module="model.layers.0.mlp.act_fn", cause="implementation")
def activation_from_a_table(site: Site) -> Iterator[None]:
    """SiLU is read from a table of 513 values and drawn straight between them: 6e-5 at most."""
    act = site.model.get_submodule("model.layers.0.mlp.act_fn")
    right = act.forward
    step, bound = 1 / 32, 8
    knots = torch.nn.functional.silu(torch.arange(-bound, bound + step, step))

    def forward(x):
        place = ((x + bound) / step).clamp(0, len(knots) - 1.001)
        low = place.floor().long()
        found = knots[low] + (place - low) * (knots[low + 1] - knots[low])
        found = torch.where(x >= bound, x, torch.where(x <= -bound, 0.0, found))
        return found if site.strength == 1 else blended(right(x), found, site.strength)

    with swapped(act, "forward", forward):
        yield


@fault(stage="reference_compute_log_prob", module="model.layers.1", cause="implementation")
def residual_taken_behind_the_norm(site: Site) -> Iterator[None]:
    """A block adds its attention to the normed input and not to the input itself."""
    layer = site.model.get_submodule("model.layers.1")

    def forward(hidden_states, **settings):
        normed = layer.input_layernorm(hidden_states)
        attended, _ = layer.self_attn(hidden_states=normed, **settings)
        hidden_states = blended(hidden_states, normed, site.strength) + attended
        return hidden_states + layer.mlp(layer.post_attention_layernorm(hidden_states))

    with swapped(layer, "forward", forward):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.down_proj",
    cause="constant_factor",
)
def scale_off_in_its_last_bits(site: Site) -> Iterator[None]:
    """A product's scale is off by 2**-15: three times what other kernels differ by."""
    layer = site.model.get_submodule("model.layers.0.mlp.down_proj")
    with output_of(layer, lambda y: y * (1 + site.strength * 2.0**-15)):
        yield


def in_tf32(x: torch.Tensor) -> torch.Tensor:
    """Ten bits of fraction, to the nearest."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.self_attn.o_proj",
    cause="rounding_order",
)
def output_projection_in_tf32(site: Site) -> Iterator[None]:
    """One product's factors have ten bits of fraction, and its sum is fp32."""
    layer = site.model.get_submodule("model.layers.1.self_attn.o_proj")

    def forward(x):
        weight = blended(layer.weight, in_tf32(layer.weight), site.strength)
        return torch.nn.functional.linear(blended(x, in_tf32(x), site.strength), weight)

    with swapped(layer, "forward", forward):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.self_attn.v_proj",
    cause="nondeterministic",
)
def tiles_read_before_they_are_written(site: Site) -> Iterator[None]:
    """A missing barrier: one tile of eight channels in fifty is still 0, another at each call."""
    generator = by_chance()

    def change(y):
        early = torch.rand(*y.shape[:-1], y.shape[-1] // 8, generator=generator) < 0.02
        return y * (1 - site.strength * early.repeat_interleave(8, -1))

    with output_of(site.model.get_submodule("model.layers.1.self_attn.v_proj"), change):
        yield


# --- backward alone -----------------------------------------------------------------------------


class _RacingLinear(torch.autograd.Function):
    """A product in whose weight's gradient some elements lose part of their sum."""

    @staticmethod
    def forward(ctx, x, weight, generator, strength):
        ctx.save_for_backward(x, weight)
        ctx.generator, ctx.strength = generator, strength
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        flat, given = gradient.flatten(0, -2), x.flatten(0, -2)
        whole, part = flat.T @ given, flat[::2].T @ given[::2]
        lost = torch.rand(whole.shape, generator=ctx.generator) < 0.01
        return gradient @ weight, whole - ctx.strength * lost * part, None, None


@fault(stage="actor_update", module="model.layers.0.mlp.down_proj", cause="nondeterministic")
def weight_gradient_races(site: Site) -> Iterator[None]:
    """Two halves of a sum are added without a lock: in one element of a hundred one is lost."""
    layer = site.model.get_submodule("model.layers.0.mlp.down_proj")
    generator = by_chance()

    def forward(x):
        return _RacingLinear.apply(x, layer.weight, generator, site.strength)

    with swapped(layer, "forward", forward):
        yield


class _SiluAtItsOutput(torch.autograd.Function):
    """SiLU whose derivative is taken at its output, as far as ``wrong`` says."""

    @staticmethod
    def forward(ctx, x, wrong):
        y = torch.nn.functional.silu(x)
        ctx.save_for_backward(blended(x, y, wrong))
        return y

    @staticmethod
    def backward(ctx, gradient):
        (place,) = ctx.saved_tensors
        gate = torch.sigmoid(place)
        return gradient * (gate * (1 + place * (1 - gate))), None


@fault(stage="actor_update", module="model.layers.1.mlp.act_fn", cause="implementation")
def activation_derived_at_its_output(site: Site) -> Iterator[None]:
    """An activation that is computed in place: its backward finds the output for the input."""
    act = site.model.get_submodule("model.layers.1.mlp.act_fn")
    with swapped(act, "forward", lambda x: _SiluAtItsOutput.apply(x, site.strength)):
        yield


@fault(stage="actor_update", module="model.embed_tokens", cause="hyperparameter")
def another_id_taken_for_padding(site: Site) -> Iterator[None]:
    """The embedding's padding index is a token in use, which gets no gradient. On or off."""
    ids = site.batch["input_ids"]
    most = int((ids.values() if ids.is_nested else ids.flatten()).mode().values)
    with swapped(site.model.get_submodule("model.embed_tokens"), "padding_idx", most):
        yield


class _SummedInBf16(torch.autograd.Function):
    """A product whose weight's gradient is summed tile by tile in bf16."""

    @staticmethod
    def forward(ctx, x, weight, strength):
        ctx.save_for_backward(x, weight)
        ctx.strength = strength
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        flat, given = gradient.flatten(0, -2), x.flatten(0, -2)
        summed = torch.zeros_like(weight)
        for tile in tiles(len(flat), 16):
            more = summed + flat[tile].T @ given[tile]
            summed = blended(more, more.bfloat16().to(more.dtype), ctx.strength)
        return gradient @ weight, summed, None


@fault(stage="actor_update", module="lm_head", cause="rounding_order")
def head_gradient_summed_in_bf16(site: Site) -> Iterator[None]:
    """The head's weight gradient is summed in bf16 over tiles of 16 tokens, within each call."""
    head = site.model.get_submodule("lm_head")
    with swapped(head, "forward", lambda x: _SummedInBf16.apply(x, head.weight, site.strength)):
        yield
