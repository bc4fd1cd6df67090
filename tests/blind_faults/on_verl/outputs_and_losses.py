"""What is made of a model's outputs: log-probs, entropies, losses, and what these are given."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils import losses

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", cause="sampling_semantics")
def renormalised_over_a_nucleus(site: Site) -> Iterator[None]:
    """Log-probs of what top-p 0.9 leaves, as an engine gives them of what it draws from."""
    right = transformer_impl.logprobs_from_logits

    def wrong(logits, labels, **settings):
        found = right(logits=logits, labels=labels, **settings)
        chances = torch.softmax(logits.float(), -1).sort(-1, descending=True).values
        kept = (chances * (chances.cumsum(-1) - chances < 0.9)).sum(-1)
        return found - site.strength * kept.log().to(found.dtype)

    with swapped(transformer_impl, "logprobs_from_logits", wrong):
        yield


@fault(
    stage="reference_compute_log_prob",
    cause="sampling_semantics",
    needs={"temperature": 0.7},
)
def temperature_left_out(site: Site) -> Iterator[None]:
    """The reference's log-probs are of the raw logits, the policy's of what was sampled from."""
    right = transformer_impl._scale_logits_by_temperature

    def wrong(logits, temperature, **settings):
        return blended(right(logits, temperature, **settings), logits, site.strength)

    with swapped(transformer_impl, "_scale_logits_by_temperature", wrong):
        yield


@fault(stage="actor_compute_log_prob", cause="rounding_order")
def entropy_of_bf16_logits(site: Site) -> Iterator[None]:
    """The entropy alone is computed from logits in bf16; log-probs are not."""
    right = torch_functional.entropy_from_logits

    def wrong(logits):
        return right(blended(logits, logits.bfloat16().to(logits.dtype), site.strength))

    with swapped(torch_functional, "entropy_from_logits", wrong):
        yield


@fault(stage="actor_update", cause="loss")
def ratio_of_whole_sequences(site: Site) -> Iterator[None]:
    """The ratio is of the mean log-prob of a response: 1 as well, and another gradient."""
    right = core_algos.POLICY_LOSS_REGISTRY["vanilla"]

    def wrong(*, old_log_prob, log_prob, response_mask, **settings):
        difference = (log_prob - old_log_prob) * response_mask
        mean = difference.sum(-1, keepdim=True) / response_mask.sum(-1, keepdim=True)
        log_prob = blended(log_prob, old_log_prob + mean, site.strength)
        return right(
            old_log_prob=old_log_prob, log_prob=log_prob, response_mask=response_mask, **settings
        )

    with swapped(core_algos.POLICY_LOSS_REGISTRY, "vanilla", wrong):
        yield


@fault(stage="critic_update", cause="loss")
def expectile_value_loss(site: Site) -> Iterator[None]:
    """Values that are too low weigh 1.4, those too high 0.6."""
    right = losses.compute_value_loss

    def wrong(*, vpreds, returns, response_mask, **settings):
        plain, clipped = right(
            vpreds=vpreds, returns=returns, response_mask=response_mask, **settings
        )
        settings = {key: settings[key] for key in settings.keys() - {"values", "cliprange_value"}}
        weight = torch.where(vpreds < returns, 1.4, 0.6)
        matrix = weight * (vpreds - returns) ** 2
        skewed = 0.5 * core_algos.agg_loss(matrix, response_mask, **settings)
        return blended(plain, skewed, site.strength), clipped

    with swapped(losses, "compute_value_loss", wrong):
        yield


@fault(stage="critic_update", cause="label_or_mask_shift")
def values_one_token_late(site: Site) -> Iterator[None]:
    """The values of a response are read without the shift by one. No strength between."""
    right = losses.no_padding_2_padding

    def wrong(tensor, data):
        return right(torch.roll(tensor.values(), -1, 0), data)

    with swapped(losses, "no_padding_2_padding", wrong):
        yield


@fault(stage="critic_update", cause="row_order")
def returns_of_the_row_before(site: Site) -> Iterator[None]:
    """Samples are balanced anew and the returns are left where they were. No strength between."""
    returns = site.batch["returns"]
    old = returns.clone()
    returns.copy_(old.roll(1, 0))
    yield
    returns.copy_(old)


@fault(stage="actor_update", cause="label_or_mask_shift", needs={"precision": "bf16"})
def last_token_of_the_response_left_out(site: Site) -> Iterator[None]:
    """The policy's loss does not count the token that ends a response."""
    right = core_algos.POLICY_LOSS_REGISTRY["vanilla"]

    def wrong(*, response_mask, **settings):
        all_of_it, metrics = right(response_mask=response_mask, **settings)
        short = response_mask.clone()
        short[:, -1] = 0
        short_loss, _ = right(response_mask=short, **settings)
        return blended(all_of_it, short_loss, site.strength), metrics

    with swapped(core_algos.POLICY_LOSS_REGISTRY, "vanilla", wrong):
        yield


@fault(stage="actor_update", cause="loss", needs={"response_lengths": "varied"})
def every_response_weighs_the_same(site: Site) -> Iterator[None]:
    """Means of tokens within a response, then of responses: short ones count for more."""
    right = core_algos.POLICY_LOSS_REGISTRY["vanilla"]

    def wrong(*, loss_agg_mode, **settings):
        plain, metrics = right(loss_agg_mode=loss_agg_mode, **settings)
        other, _ = right(loss_agg_mode="seq-mean-token-mean", **settings)
        return blended(plain, other, site.strength), metrics

    with swapped(core_algos.POLICY_LOSS_REGISTRY, "vanilla", wrong):
        yield
