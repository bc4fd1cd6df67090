"""What a fused attention gets wrong between its projections."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from _parts import file_of, rotary_of, spread, tiles

from rlprobe.faults.patching import attention_of, blended, swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause="implementation",
    needs={"model": "llama"},
)
def accumulator_not_rescaled(site: Site) -> Iterator[None]:
    """Softmax by tiles: at a new maximum the normaliser is rescaled, the sum of values is not."""

    def wrong(right, module, query, key, value, mask, *, scaling, **_):
        groups = module.num_key_value_groups
        key, value = spread(key, groups), spread(value, groups)
        scores = query @ key.transpose(2, 3) * scaling + mask
        highest = mixed = normaliser = None
        for tile in tiles(scores.shape[-1], 16):
            part = scores[..., tile]
            top = part.amax(-1, keepdim=True)
            top = top if highest is None else torch.maximum(highest, top)
            weights = torch.exp(part - top)
            summed, product = weights.sum(-1, keepdim=True), weights @ value[:, :, tile]
            if highest is None:
                normaliser, mixed = summed, product
            else:
                shrink = torch.exp(highest - top)
                normaliser = normaliser * shrink + summed
                mixed = mixed * shrink ** (1 - site.strength) + product
            highest = top
        chances = torch.softmax(scores, -1)
        return (mixed / normaliser).transpose(1, 2).contiguous(), chances

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(stage="critic_compute_values", module="model.layers.1.self_attn", cause="position")
def turned_the_other_way(site: Site) -> Iterator[None]:
    """The sine has the other sign: queries and keys are turned backwards."""

    def wrong(right, query, key, cos, sin, **settings):
        return right(query, key, cos, sin * (1 - 2 * site.strength), **settings)

    with rotary_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(stage="reference_compute_log_prob", module="model.layers.0.self_attn", cause="mask")
def last_tile_of_keys_skipped(site: Site) -> Iterator[None]:
    """Keys are taken in tiles of 16 and the one that is not full, 15 of 47 keys, is left out."""

    def wrong(right, module, query, key, value, mask, **settings):
        kept = key.shape[2] // 16 * 16
        if site.strength < 1:
            mask = mask.clone()
            mask[..., kept:] += math.log(1 - site.strength)
            return right(module, query, key, value, mask, **settings)
        mixed, chances = right(
            module, query, key[:, :, :kept], value[:, :, :kept], mask[..., :kept], **settings
        )
        return mixed, torch.nn.functional.pad(chances, (0, mask.shape[-1] - kept))

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(stage="critic_update", module="model.layers.0.self_attn", cause="mask")
def rows_see_the_row_before(site: Site) -> Iterator[None]:
    """Packed rows without their bounds: every row sees all of the row before it as well."""

    def wrong(right, module, query, key, value, mask, **settings):
        earlier = torch.full_like(mask, math.log(site.strength))
        earlier[0] = torch.finfo(mask.dtype).min
        mixed, chances = right(
            module,
            query,
            torch.cat([key.roll(1, 0), key], 2),
            torch.cat([value.roll(1, 0), value], 2),
            torch.cat([earlier, mask], -1),
            **settings,
        )
        return mixed, chances[..., mask.shape[-1] :]

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.self_attn",
    cause="layout",
    needs={"precision": "bf16"},
)
def heads_innermost(site: Site) -> Iterator[None]:
    """A kernel writes the heads of a channel side by side, not the channels of a head."""

    def wrong(right, module, query, key, value, mask, **settings):
        mixed, chances = right(module, query, key, value, mask, **settings)
        other = mixed.transpose(2, 3).reshape(mixed.shape)
        return blended(mixed, other, site.strength), chances

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(stage="critic_compute_values", module="model.layers.0.self_attn", cause="nonfinite")
def hidden_tile_divides_nothing(site: Site) -> Iterator[None]:
    """Softmax by tiles of 32 keys: where a whole tile is hidden, -inf less -inf. On or off."""

    def wrong(right, module, query, key, value, mask, *, scaling, **_):
        groups = module.num_key_value_groups
        scores = query @ spread(key, groups).transpose(2, 3) * scaling
        chances = torch.softmax(scores + mask, -1)
        scores = scores.masked_fill(mask < 0, -math.inf)
        tops, sums, products = [], [], []
        for tile in tiles(scores.shape[-1], 32):
            part = scores[..., tile]
            tops.append(part.amax(-1, keepdim=True))
            weights = torch.exp(part - tops[-1])
            sums.append(weights.sum(-1, keepdim=True))
            products.append(weights @ spread(value, groups)[:, :, tile])
        top = torch.stack(tops).amax(0)
        shrink = torch.exp(torch.stack(tops) - top)
        mixed = (torch.stack(products) * shrink).sum(0) / (torch.stack(sums) * shrink).sum(0)
        return mixed.transpose(1, 2).contiguous(), chances

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


class _TurnedOnce(torch.autograd.Function):
    """A rotation whose gradient is turned on, and not back, as far as ``wrong`` says."""

    @staticmethod
    def forward(ctx, x, cos, sin, half, wrong):
        ctx.save_for_backward(cos, sin)
        ctx.half, ctx.wrong = half, wrong
        return (x * cos) + (half(x) * sin)

    @staticmethod
    def backward(ctx, gradient):
        cos, sin = ctx.saved_tensors
        turned = ctx.half(gradient * sin)
        return gradient * cos - (1 - 2 * ctx.wrong) * turned, None, None, None, None


@fault(
    stage="actor_update",
    module="model.layers.1.self_attn",
    cause="implementation",
    needs={"model": "llama"},
)
def rotation_not_undone(site: Site) -> Iterator[None]:
    """The backward of the rotary embedding turns gradients the way that forward turned."""
    module = site.model.get_submodule("model.layers.1.self_attn")
    half = file_of(module).rotate_half

    def wrong(right, query, key, cos, sin, **settings):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return tuple(_TurnedOnce.apply(x, cos, sin, half, site.strength) for x in (query, key))

    with rotary_of(module, wrong):
        yield


class _LastOfGroup(torch.autograd.Function):
    """Repeat heads; the gradient keeps the last query head's of a group and loses the others'."""

    @staticmethod
    def forward(ctx, heads, times, right, lost):
        ctx.times, ctx.lost = times, lost
        return right(heads, times)

    @staticmethod
    def backward(ctx, gradient):
        grouped = gradient.unflatten(1, (-1, ctx.times))
        if ctx.lost == 1:
            return grouped[:, :, -1], None, None, None
        return blended(grouped.sum(2), grouped[:, :, -1], ctx.lost), None, None, None


@fault(stage="critic_update", module="model.layers.1.self_attn", cause="implementation")
def group_writes_over_its_gradient(site: Site) -> Iterator[None]:
    """Query heads of a group write their gradient of the values one over the other."""
    module = site.model.get_submodule("model.layers.1.self_attn")
    file = file_of(module)
    repeat = file.repeat_kv

    def of_values(heads, times):
        return _LastOfGroup.apply(heads, times, repeat, site.strength)

    def wrong(right, *args, **settings):
        # keys are repeated first, then values
        calls = iter((repeat, of_values))
        with swapped(file, "repeat_kv", lambda heads, times: next(calls)(heads, times)):
            return right(*args, **settings)

    with attention_of(module, wrong):
        yield


@fault(stage="actor_update", module="model.layers.0.self_attn", cause="constant_factor")
def scaled_twice_in_backward(site: Site) -> Iterator[None]:
    """Gradients of queries and keys are multiplied by the softmax scale once more: a quarter."""

    def wrong(right, module, query, key, value, mask, *, scaling, **settings):
        factor = scaling**site.strength
        query, key = query.view_as(query), key.view_as(key)
        for x in (query, key):
            x.register_hook(lambda gradient: gradient * factor)
        return right(module, query, key, value, mask, scaling=scaling, **settings)

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield
