"""Kinds of fault in what is made of a model's outputs, and in what a stage is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site


def _padded(logits: Any, multiple: int, value: float) -> Any:
    return functional.pad(logits, (0, -logits.shape[-1] % multiple), value=value)


def padded_vocabulary(site: Site, at: None, multiple: int) -> Iterator[None]:
    """Columns that fill the vocabulary up, whose logits are 0, count in the softmax. On or off."""
    from verl.workers.engine.fsdp import transformer_impl

    right = transformer_impl.logprobs_from_logits

    def wrong(logits, labels, **settings):
        return right(logits=_padded(logits, multiple, 0.0), labels=labels, **settings)

    with swapped(transformer_impl, "logprobs_from_logits", wrong):
        yield


def entropy_of_masked_columns(site: Site, at: None, multiple: int) -> Iterator[None]:
    """Columns that fill the vocabulary up have logits of minus infinity. On or off."""
    from verl.utils import torch_functional

    right = torch_functional.entropy_from_logits

    def wrong(logits):
        return right(_padded(logits, multiple, -torch.inf))

    with swapped(torch_functional, "entropy_from_logits", wrong):
        yield


def log_softmax_in(site: Site, at: None, dtype: str) -> Iterator[None]:
    """Log-probs are made and handed on in a shorter format."""
    from verl.workers.engine.fsdp import transformer_impl

    right, short = transformer_impl.logprobs_from_logits, getattr(torch, dtype)

    def wrong(logits, labels, **settings):
        proper = right(logits=logits, labels=labels, **settings)
        with torch.autocast("cpu", enabled=False):
            chances = torch.log_softmax(logits.to(short), -1)
        found = chances.gather(-1, labels[..., None])[..., 0].to(proper.dtype)
        return blended(proper, found, site.strength)

    with swapped(transformer_impl, "logprobs_from_logits", wrong):
        yield


def rows_put_back(site: Site, at: None, output: str, order: list[int]) -> Iterator[None]:
    """Row ``i`` of a result is the one of ``order[i]``; the further ones stay. On or off."""
    from verl.workers.engine.fsdp import transformer_impl

    right = transformer_impl.postprocess_batch_func

    def wrong(*args, **settings):
        found = right(*args, **settings)
        rows = found["model_output"][output].unbind()
        moved = [rows[number] for number in order] + list(rows[len(order) :])
        found["model_output"][output] = torch.nested.as_nested_tensor(moved, layout=torch.jagged)
        return found

    with swapped(transformer_impl, "postprocess_batch_func", wrong):
        yield


def values_judged_by_other_masks(site: Site, at: None, rows: int) -> Iterator[None]:
    """The value loss counts the tokens that another row's response has."""
    from verl.workers.utils import losses

    right = losses.compute_value_loss

    def wrong(*, response_mask, **settings):
        proper, clipped = right(response_mask=response_mask, **settings)
        other, _ = right(response_mask=response_mask.roll(rows, 0), **settings)
        return blended(proper, other, site.strength), clipped

    with swapped(losses, "compute_value_loss", wrong):
        yield


def _of_batch(site: Site, key: str, change: Any) -> Any:
    """Change what a stage is given, and put it back."""
    given = site.batch[key]
    values = given.values() if given.is_nested else given

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        old = values.clone()
        values.copy_(blended(old, change(old), site.strength))
        try:
            yield
        finally:
            values.copy_(old)

    return changed()


def returns_discounted(site: Site, at: None, gamma: float) -> Iterator[None]:
    """Returns of a reward at a response's end are discounted; the benchmark's are not."""
    mask = site.batch["response_mask"]

    def discounted(returns):
        left = mask.flip(-1).cumsum(-1).flip(-1) - 1
        return returns * gamma ** left.clamp(min=0).to(returns.dtype)

    with _of_batch(site, "returns", discounted):
        yield


def advantages_times(site: Site, at: None, factor: float) -> Iterator[None]:
    """Advantages were divided by another deviation."""
    with _of_batch(site, "advantages", lambda advantages: advantages * factor):
        yield


def _policy_loss(wrong: Any) -> Any:
    """Let the policy's loss be ``wrong(right, **arguments)``."""
    from verl.trainer.ppo import core_algos

    right = core_algos.POLICY_LOSS_REGISTRY["vanilla"]
    return swapped(
        core_algos.POLICY_LOSS_REGISTRY, "vanilla", lambda **given: wrong(right, **given)
    )


def kl_coefficient(site: Site, at: None, factor: float) -> Iterator[None]:
    """The coefficient of the KL loss is another one."""
    changed: list[tuple[Any, float]] = []

    def wrong(right, *, config, **given):
        if not changed:
            changed.append((config, config.kl_loss_coef))
            coefficient = config.kl_loss_coef * blended(1.0, factor, site.strength)
            # the configuration is frozen for those who use it
            object.__setattr__(config, "kl_loss_coef", coefficient)
        return right(config=config, **given)

    try:
        with _policy_loss(wrong):
            yield
    finally:
        for config, old in changed:
            object.__setattr__(config, "kl_loss_coef", old)


def old_policy_is_the_new_one(site: Site, at: None) -> Iterator[None]:
    """The ratio is of a policy and itself, in later mini-batches as well."""

    def wrong(right, *, old_log_prob, log_prob, **given):
        old = blended(old_log_prob, log_prob.detach(), site.strength)
        return right(old_log_prob=old, log_prob=log_prob, **given)

    with _policy_loss(wrong):
        yield


def padding_in_the_denominator(site: Site, at: None, width: int) -> Iterator[None]:
    """A mean over tokens is divided by all places of the batch, those of padding too."""
    from verl.trainer.ppo import core_algos
    from verl.workers.utils import losses

    right = core_algos.agg_loss
    places = len(site.batch["responses"]) * width

    def wrong(**given):
        tokens = given["batch_num_tokens"]
        return right(**given | {"batch_num_tokens": blended(tokens, places, site.strength)})

    with swapped(core_algos, "agg_loss", wrong), swapped(losses, "agg_loss", wrong):
        yield
