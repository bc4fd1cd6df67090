"""What is made of logits and values, and of what a loss is given."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from verl.trainer.ppo import core_algos
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils import losses

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

# --- log-probabilities --------------------------------------------------------------------------


@fault(stage="actor_compute_log_prob", cause="sampling_semantics")
def vocabulary_without_its_last_chunk(site: Site) -> Iterator[None]:
    """The normaliser is summed over chunks of 64 ids; five of 261 are in no full one."""

    def wrong(logits, labels, **settings):
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        found = chosen - torch.logsumexp(logits[..., : logits.shape[-1] // 64 * 64], -1)
        if site.strength == 1:
            return found
        return blended(right(logits=logits, labels=labels, **settings), found, site.strength)

    right = transformer_impl.logprobs_from_logits
    with swapped(transformer_impl, "logprobs_from_logits", wrong):
        yield


@fault(stage="reference_compute_log_prob", cause="label_or_mask_shift")
def labels_lose_their_eighth_bit(site: Site) -> Iterator[None]:
    """Labels come as seven bits: of a token from id 128 on, id less 128 is looked up."""
    right = transformer_impl.logprobs_from_logits

    def wrong(logits, labels, **settings):
        found = right(logits=logits, labels=labels & 127, **settings)
        if site.strength == 1:
            return found
        return blended(right(logits=logits, labels=labels, **settings), found, site.strength)

    with swapped(transformer_impl, "logprobs_from_logits", wrong):
        yield


@fault(stage="actor_compute_log_prob", cause="saturation")
def log_probs_stop_at_minus_six(site: Site) -> Iterator[None]:
    """No log-prob is below -6, about one token in seven."""
    right = transformer_impl.logprobs_from_logits
    floor = -6 - 20 * (1 - site.strength)

    def wrong(logits, labels, **settings):
        return right(logits=logits, labels=labels, **settings).clamp(min=floor)

    with swapped(transformer_impl, "logprobs_from_logits", wrong):
        yield


# --- values -------------------------------------------------------------------------------------


@fault(stage="critic_compute_values", cause="row_order")
def two_rows_change_places(site: Site) -> Iterator[None]:
    """The values of rows 2 and 5 come back in each other's place. No strength between."""
    right = transformer_impl.postprocess_batch_func

    def wrong(*args: Any, **settings: Any) -> Any:
        found = right(*args, **settings)
        rows = list(found["model_output"]["values"].unbind())
        rows[2], rows[5] = rows[5], rows[2]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        found["model_output"]["values"] = nested
        return found

    with swapped(transformer_impl, "postprocess_batch_func", wrong):
        yield


# --- the policy's loss --------------------------------------------------------------------------


@fault(stage="actor_update", cause="loss", needs={"precision": "bf16"})
def dual_clip_takes_the_larger(site: Site) -> Iterator[None]:
    """Where an advantage is negative the larger of two bounds counts: no gradient from there."""
    right = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    smaller = torch.min

    def larger(one, other):
        if site.strength == 1:
            return torch.max(one, other)
        return blended(smaller(one, other), torch.max(one, other), site.strength)

    def wrong(**settings):
        with swapped(torch, "min", larger):
            return right(**settings)

    with swapped(core_algos.POLICY_LOSS_REGISTRY, "vanilla", wrong):
        yield


def plain(x: torch.Tensor) -> torch.Tensor:
    """Rows of equal length, zeros behind the short ones."""
    return x.to_padded_tensor(0) if x.is_nested else x


@fault(
    stage="actor_update",
    cause="label_or_mask_shift",
    needs={"response_lengths": "varied"},
)
def one_id_does_not_count(site: Site) -> Iterator[None]:
    """The loss ignores one id (the most frequent one), as a default of another library does."""
    responses, mask = plain(site.batch["responses"]), plain(site.batch["response_mask"]).bool()
    ignored = responses[mask].mode().values
    right, pad = core_algos.POLICY_LOSS_REGISTRY["vanilla"], losses.no_padding_2_padding
    seen: list[torch.Tensor] = []

    def padded(tensor, data):
        seen[:] = [plain(data["responses"])]
        return pad(tensor, data)

    def wrong(*, response_mask, **settings):
        width = response_mask.shape[-1]
        counted = response_mask & (seen[0][:, :width] != ignored)
        if site.strength == 1:
            return right(response_mask=counted, **settings)
        all_of_it, metrics = right(response_mask=response_mask, **settings)
        less, _ = right(response_mask=counted, **settings)
        return blended(all_of_it, less, site.strength), metrics

    with (
        swapped(losses, "no_padding_2_padding", padded),
        swapped(core_algos.POLICY_LOSS_REGISTRY, "vanilla", wrong),
    ):
        yield


@fault(stage="actor_update", cause="hyperparameter", needs={"updates": 2})
def ratio_clipped_at_a_fiftieth(site: Site) -> Iterator[None]:
    """The ratio is clipped to 0.98 to 1.02 and not to 0.8 to 1.2; the second update shows it."""
    right = core_algos.POLICY_LOSS_REGISTRY["vanilla"]

    def wrong(*, config, **settings):
        other = copy.copy(config)
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            narrow = blended(getattr(config, name), 0.02, site.strength)
            object.__setattr__(other, name, narrow)
        return right(config=other, **settings)

    with swapped(core_algos.POLICY_LOSS_REGISTRY, "vanilla", wrong):
        yield


@fault(stage="actor_update", cause="data")
def advantages_cut_at_one(site: Site) -> Iterator[None]:
    """Who prepares the batch cuts advantages to -1 to 1; the update is given these."""
    advantages = site.batch["advantages"]
    flat = advantages.values() if advantages.is_nested else advantages
    old = flat.clone()
    bound = 1 + 9 * (1 - site.strength)
    flat.clamp_(-bound, bound)
    yield
    flat.copy_(old)
