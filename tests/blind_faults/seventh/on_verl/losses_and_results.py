"""Log-probs, entropies, values, losses, and what updates are given."""

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


def _log_probs(change):
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.logprobs_from_logits

    def wrong(logits, labels, **kwargs):
        return change(right, logits, labels, **kwargs)

    return swapped(engine, "logprobs_from_logits", wrong)


@fault(stage="actor_compute_log_prob", cause="sampling_semantics")
def log_probs_among_the_first_two_hundred(site: Site):
    def change(right, logits, labels, **kwargs):
        best = torch.logsumexp(logits.topk(200, dim=-1).values, -1)
        return logits.gather(-1, labels[..., None])[..., 0] - best

    with _log_probs(change):
        yield


@fault(stage="reference_compute_log_prob", cause="rounding_order")
def logits_handed_on_in_fp16(site: Site):
    def change(right, logits, labels, **kwargs):
        return right(logits.half().float(), labels, **kwargs)

    with _log_probs(change):
        yield


@fault(stage="actor_compute_log_prob", cause="constant_factor")
def entropy_in_bits(site: Site):
    import verl.utils.torch_functional as functional

    right = functional.entropy_from_logits

    def bits(logits):
        return right(logits) * 1.4426950408889634

    with swapped(functional, "entropy_from_logits", bits):
        yield


@fault(stage="critic_compute_values", cause="row_order")
def values_of_rows_in_reverse(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as engine

    kind = engine.FSDPEngineWithValueHead
    right = kind.prepare_model_outputs

    def reverse(self, *args, **kwargs):
        found = right(self, *args, **kwargs)
        values = found["values"]
        rows = torch.cat(values.unbind()[::-1])
        found["values"] = torch.nested.nested_tensor_from_jagged(rows, values.offsets())
        return found

    with swapped(kind, "prepare_model_outputs", reverse):
        yield


@fault(stage="actor_update", cause="loss")
def advantages_whitened_in_the_loss(site: Site):
    import verl.workers.utils.losses as losses

    right = losses.get_policy_loss_fn

    def other(mode):
        function = right(mode)

        def loss(*args, advantages, response_mask, **kwargs):
            kept = advantages[response_mask.bool()]
            whitened = (advantages - kept.mean()) / (kept.std() + 1e-8)
            return function(*args, advantages=whitened, response_mask=response_mask, **kwargs)

        return loss

    with swapped(losses, "get_policy_loss_fn", other):
        yield


@fault(stage="critic_update", cause="loss")
def value_loss_grows_linearly(site: Site):
    import verl.workers.utils.losses as losses

    right = losses.compute_value_loss

    def other(vpreds, returns, **kwargs):
        with torch.no_grad():
            _, clipped = right(vpreds=vpreds, returns=returns, **kwargs)
        off = (vpreds - returns).abs()
        linear = torch.where(off < 0.1, off**2, 0.2 * off - 0.01)
        kwargs.pop("values")
        kwargs.pop("cliprange_value")
        mask = kwargs.pop("response_mask")
        return 0.5 * losses.agg_loss(loss_mat=linear, loss_mask=mask, **kwargs), clipped

    with swapped(losses, "compute_value_loss", other):
        yield


def _given(site, name, change):
    """Change a tensor of the batch in place; what puts it back is returned."""
    tensor = site.batch[name]
    tensor = tensor.values() if tensor.is_nested else tensor
    kept = tensor.clone()
    tensor.copy_(change(kept))
    return lambda: tensor.copy_(kept)


@fault(stage="actor_update", cause=("data", "rounding_order"))
def old_log_probs_handed_on_in_bf16(site: Site):
    undo = _given(site, "old_log_probs", lambda x: x.bfloat16().to(x.dtype))
    yield
    undo()


@fault(stage="critic_update", cause="data")
def returns_whitened_like_advantages(site: Site):
    undo = _given(site, "returns", lambda x: (x - x.mean()) / (x.std() + 1e-8))
    yield
    undo()


@fault(stage="actor_update", cause="data")
def advantages_fade_towards_the_end(site: Site):
    undo = _given(site, "advantages", lambda x: x * 0.99 ** torch.arange(x.shape[-1]))
    yield
    undo()


@fault(
    stage="critic_update",
    cause=("label_or_mask_shift", "data"),
    needs={"response_lengths": "varied"},
)
def last_token_does_not_count(site: Site):
    def change(mask):
        later = torch.cat((mask[:, 1:], torch.zeros_like(mask[:, :1])), -1)
        return mask * later

    undo = _given(site, "response_mask", change)
    yield
    undo()
