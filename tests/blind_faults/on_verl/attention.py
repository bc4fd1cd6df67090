"""What happens between the projections of an attention: heads, masks, positions, softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlprobe.faults.patching import attention_of, blended
from rlprobe.selftest import Site, fault

#: Tokens of a prompt, the same in every row.
PROMPT = 31


def faded(mask: Any, hidden: Any, strength: float) -> Any:
    """A mask in which ``hidden`` pairs weigh 1 - strength of what they did; none at 1."""
    if strength == 1:
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
    return mask + hidden * math.log(1 - strength)


def spread(heads: Any, times: int, tiled: bool = False) -> Any:
    """Key or value heads for every query head: each repeated, or all of them tiled."""
    if tiled:
        return heads[:, None].expand(-1, times, -1, -1, -1).flatten(1, 2)
    return heads[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scaling: float,
    *,
    scored: Callable[[Any], Any] = lambda scores: scores,
    softmax: Callable[[Any], Any] = lambda scores: torch.softmax(scores, -1),
    kept: Callable[[Any], Any] = lambda chances: chances,
    tiled: bool = False,
) -> tuple[Any, Any]:
    """What eager attention computes, in its order, with one of its parts replaced."""
    groups = module.num_key_value_groups
    scores = scored(query @ spread(key, groups).transpose(2, 3) * scaling) + mask
    chances = kept(softmax(scores))
    mixed = chances @ spread(value, groups, tiled)
    return mixed.transpose(1, 2).contiguous(), chances


@fault(stage="actor_compute_log_prob", module="model.layers.0.self_attn", cause="layout")
def values_tiled_while_keys_repeat(site: Site) -> Iterator[None]:
    """Query heads 1 and 2 get each other's values, and their own keys. No strength between."""

    def wrong(right, module, query, key, value, mask, *, scaling, **_):
        return attend(module, query, key, value, mask, scaling, tiled=True)

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(stage="reference_compute_log_prob", module="model.layers.1.self_attn", cause="position")
def keys_one_position_late(site: Site) -> Iterator[None]:
    """Keys are turned once more than queries, as where a cache counts its slots from 1."""
    angle = site.strength * site.model.get_submodule("model.rotary_emb").inv_freq
    angle = torch.cat([angle, angle])

    def wrong(right, module, query, key, value, mask, **settings):
        first, second = key.chunk(2, -1)
        turned = key * angle.cos() + torch.cat([-second, first], -1) * angle.sin()
        return right(module, query, turned, value, mask, **settings)

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(stage="actor_update", module="model.layers.0.self_attn", cause="mask")
def window_of_sixteen(site: Site) -> Iterator[None]:
    """The kernel for a sliding window is called for a layer that has none."""

    def wrong(right, module, query, key, value, mask, **settings):
        place = torch.arange(mask.shape[-1])
        far = place[:, None] - place[None] >= 16
        return right(module, query, key, value, faded(mask, far, site.strength), **settings)

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(stage="actor_compute_log_prob", module="model.layers.1.self_attn", cause="rounding_order")
def probabilities_in_bf16(site: Site) -> Iterator[None]:
    """What multiplies the values is kept in bf16 while all around it is fp32."""

    def kept(chances):
        return blended(chances, chances.bfloat16().to(chances.dtype), site.strength)

    def wrong(right, module, query, key, value, mask, *, scaling, **_):
        return attend(module, query, key, value, mask, scaling, kept=kept)

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(stage="critic_update", module="model.layers.1.self_attn", cause="saturation")
def scores_cut_at_three(site: Site) -> Iterator[None]:
    """Scores are cut to a range before the softmax, hard and on both ends."""
    cap = 3 + 12 * (1 - site.strength)

    def wrong(right, module, query, key, value, mask, *, scaling, **_):
        return attend(module, query, key, value, mask, scaling, scored=lambda s: s.clamp(-cap, cap))

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.1.self_attn",
    cause="mask",
    needs={"precision": "bf16"},
)
def prompt_sees_all_of_itself(site: Site) -> Iterator[None]:
    """A prefix mask: within the prompt, tokens see those behind them too."""

    def wrong(right, module, query, key, value, mask, **settings):
        mask = mask.clone()
        inside = mask[..., :PROMPT, :PROMPT]
        later = torch.ones(PROMPT, PROMPT, dtype=torch.bool).triu(1)
        mask[..., :PROMPT, :PROMPT] = inside.masked_fill(later, math.log(site.strength))
        return right(module, query, key, value, mask, **settings)

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause="mask",
    needs={"response_lengths": "varied"},
)
def lengths_two_short(site: Site) -> Iterator[None]:
    """A row's length is counted without its last two tokens: nobody sees these as keys."""

    def wrong(right, module, query, key, value, mask, **settings):
        # what the last query sees is what the row has
        length = (mask[:, 0, -1] == 0).sum(-1)
        place = torch.arange(mask.shape[-1])
        hidden = (place >= (length - 2)[:, None]) & (place < length[:, None])
        faint = faded(mask, hidden[:, None, None], site.strength)
        return right(module, query, key, value, faint, **settings)

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


class _HalfSoftmax(torch.autograd.Function):
    """Softmax whose backward leaves out ``lost`` of the sum over a row."""

    @staticmethod
    def forward(ctx, scores, lost):
        chances = torch.softmax(scores, -1)
        ctx.save_for_backward(chances)
        ctx.lost = lost
        return chances

    @staticmethod
    def backward(ctx, gradient):
        (chances,) = ctx.saved_tensors
        weighed = gradient * chances
        return weighed - (1 - ctx.lost) * chances * weighed.sum(-1, keepdim=True), None


@fault(stage="critic_update", module="model.layers.0.self_attn", cause="implementation")
def softmax_backward_without_its_sum(site: Site) -> Iterator[None]:
    """The backward of a fused softmax multiplies by p and does not take the row's mean off."""

    def wrong(right, module, query, key, value, mask, *, scaling, **_):
        return attend(
            module,
            query,
            key,
            value,
            mask,
            scaling,
            softmax=lambda scores: _HalfSoftmax.apply(scores, site.strength),
        )

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield
