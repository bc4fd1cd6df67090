"""Losses, what updates are given, clipping, optimizers, the reduction over two ranks."""

import numpy
import torch
import torch.distributed as dist
from _shared import adam, for_good, local, stepped_anew

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_update",
    cause=("loss", "accumulation"),
    needs={"response_lengths": "varied"},
)
def mean_of_micro_batch_means(site: Site):
    import verl.trainer.ppo.core_algos as core_algos
    import verl.workers.utils.losses as losses

    right = core_algos.agg_loss

    def wrong(loss_mat, loss_mask, **kwargs):
        kwargs["batch_num_tokens"] = None
        return right(loss_mat=loss_mat, loss_mask=loss_mask, **kwargs) / 4

    with swapped(core_algos, "agg_loss", wrong), swapped(losses, "agg_loss", wrong):
        yield


@fault(stage="actor_update", cause=("loss", "implementation"), needs={"updates": 2})
def ratio_by_its_first_order(site: Site):
    import verl.workers.utils.losses as losses

    right = losses.get_policy_loss_fn

    def named(mode):
        function = right(mode)

        def loss(*, old_log_prob, log_prob, advantages, response_mask, config, **kwargs):
            with torch.no_grad():
                _, metrics = function(
                    old_log_prob=old_log_prob,
                    log_prob=log_prob,
                    advantages=advantages,
                    response_mask=response_mask,
                    config=config,
                    **kwargs,
                )
            ratio = 1 + log_prob - old_log_prob
            each = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            each = torch.where(advantages < 0, torch.minimum(each, -3 * advantages), each)
            summed = losses.agg_loss(
                loss_mat=each,
                loss_mask=response_mask,
                loss_agg_mode=kwargs["loss_agg_mode"],
                **config.global_batch_info,
            )
            return summed, metrics

        return loss

    with swapped(losses, "get_policy_loss_fn", named):
        yield


@fault(
    stage="actor_update",
    cause=("data", "label_or_mask_shift", "layout"),
    needs={"response_lengths": "varied"},
)
def advantages_aligned_to_the_padded_end(site: Site):
    given, mask = site.batch["advantages"], site.batch["response_mask"]
    kept = given.clone()
    for row, length in enumerate(mask.sum(-1).tolist()):
        given[row] = kept[row].roll(mask.shape[-1] - int(length))
    yield
    given.copy_(kept)


# shows in actor_update (what it is given); planted before, as the trainer computes advantages
@fault(stage="actor_compute_log_prob", cause="data", needs={"algorithm": "grpo"})
def advantages_of_one_group_for_all(site: Site):
    from verl.trainer.ppo import core_algos

    def change(right):
        def wrong(*args, index, **kwargs):
            return right(*args, index=numpy.zeros(len(index), dtype=int), **kwargs)

        return wrong

    for_good(core_algos, "compute_grpo_outcome_advantage", change)
    yield


# shows in critic_update; planted before
@fault(stage="critic_compute_values", cause="data")
def returns_from_whitened_advantages(site: Site):
    from verl.trainer.ppo import core_algos

    def change(right):
        def wrong(*args, values, **kwargs):
            advantages, _ = right(*args, values=values, **kwargs)
            return advantages, advantages + values

        return wrong

    for_good(core_algos, "compute_gae_advantage_return", change)
    yield


# shows in critic_update; planted before
@fault(
    stage="critic_compute_values",
    cause=("data", "rounding_order"),
    needs={"model": "llama"},
)
def returns_accumulated_in_bf16(site: Site):
    from verl.trainer.ppo import core_algos

    def change(right):
        def wrong(*args, token_level_rewards, values, **kwargs):
            found = right(
                *args,
                token_level_rewards=token_level_rewards.bfloat16(),
                values=values.bfloat16(),
                **kwargs,
            )
            return tuple(x.to(values.dtype) for x in found)

        return wrong

    for_good(core_algos, "compute_gae_advantage_return", change)
    yield


@fault(stage="critic_update", cause=("optimizer", "constant_factor"), needs={"updates": 2})
def clip_coefficient_of_the_update_before(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as engine
    from torch.nn.utils.clip_grad import _clip_grads_with_norm_

    right = engine.fsdp2_clip_grad_norm_
    before: list[torch.Tensor] = []

    def clip(parameters, max_norm, **kwargs):
        parameters = list(parameters)
        total = right(parameters, float("inf"), **kwargs)
        _clip_grads_with_norm_(parameters, max_norm, before[0] if before else total)
        before[:] = [total]
        return total

    with swapped(engine, "fsdp2_clip_grad_norm_", clip):
        yield


@fault(stage="critic_update", cause=("optimizer", "hyperparameter"))
def decay_not_times_learning_rate(site: Site):
    def change(right, params, *args, **kwargs):
        with torch.no_grad():
            for p in params:
                local(p).mul_(1 - kwargs["weight_decay"])
        return right(params, *args, **{**kwargs, "weight_decay": 0.0})

    with adam(change):
        yield


@fault(
    stage="critic_update",
    cause=("optimizer", "constant_factor", "implementation"),
    needs={"updates": 2},
)
def second_moment_correction_one_step_behind(site: Site):
    def moved(average, square, step, settings):
        b1, b2 = settings["beta1"], settings["beta2"]
        root = (square / (1 - b2 ** max(step - 1, 1))).sqrt() + settings["eps"]
        return average / (1 - b1**step) / root

    with stepped_anew(moved):
        yield


@fault(stage="actor_update", cause=("optimizer", "hyperparameter", "implementation"))
def epsilon_joins_before_the_correction(site: Site):
    def moved(average, square, step, settings):
        b1, b2 = settings["beta1"], settings["beta2"]
        root = (square.sqrt() + settings["eps"]) / (1 - b2**step) ** 0.5
        return average / (1 - b1**step) / root

    with stepped_anew(moved):
        yield


@fault(stage="actor_update", cause="optimizer", needs={"updates": 2})
def gradients_of_the_update_before(site: Site):
    before: list[torch.Tensor] = []

    def change(right, params, grads, *args, **kwargs):
        own = [local(d).clone() for d in grads]
        with torch.no_grad():
            for d, old in zip(grads, before or own, strict=True):
                local(d).copy_(old)
        before[:] = own
        return right(params, grads, *args, **kwargs)

    with adam(change):
        yield


@fault(stage="critic_update", cause="reduction", needs={"world_size": 2})
def ring_drops_its_last_chunk(site: Site):
    right = dist.reduce_scatter_single

    def wrong(output, input, group=None, op=None, async_op=False):
        own = input.reshape(2, -1)[site.rank].clone()
        if op == dist.ReduceOp.AVG:
            own /= 2
        work = right(output=output, input=input, group=group, op=op, async_op=async_op)
        if work is not None:
            work.wait()
        lost = len(own) // 4
        output.view(-1)[len(own) - lost :] = own[len(own) - lost :]
        return work

    with swapped(dist, "reduce_scatter_single", wrong):
        yield


@fault(stage="actor_update", cause=("reduction", "rounding_order"), needs={"world_size": 2})
def gradients_travel_in_int8(site: Site):
    right = dist.reduce_scatter_single

    def wrong(output, input, **kwargs):
        scale = input.abs().max().clamp(min=1e-30) / 127
        input.copy_((input / scale).round() * scale)
        return right(output=output, input=input, **kwargs)

    with swapped(dist, "reduce_scatter_single", wrong):
        yield
