"""Optimizers, clipping, ranks, experts, adapters, second mini-batches."""

import contextlib

import torch
import torch.distributed as dist

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


def _local(tensor):
    return getattr(tensor, "_local_tensor", tensor)


@contextlib.contextmanager
def _adam(change):
    """Let torch's Adam be ``change(right, params, grads, averages, squares, …)``."""
    import torch.optim.adam as file

    right = file.adam

    def wrong(*args, **kwargs):
        return change(right, *args, **kwargs)

    with swapped(file, "adam", wrong):
        yield


@fault(stage="actor_update", cause=("optimizer", "rounding_order"))
def second_moments_kept_in_bf16(site: Site):
    def change(right, params, grads, averages, squares, most, steps, **kwargs):
        before = [_local(p).clone() for p in params]
        right(params, grads, averages, squares, most, steps, **kwargs)
        b1, b2, lr = kwargs["beta1"], kwargs["beta2"], kwargs["lr"]
        with torch.no_grad():
            for p, old, m, v, step in zip(params, before, averages, squares, steps, strict=True):
                n = float(_local(step))
                square = _local(v)
                square.copy_(square.bfloat16())
                root = (square / (1 - b2**n)).sqrt() + kwargs["eps"]
                decayed = old * (1 - lr * kwargs["weight_decay"])
                _local(p).copy_(decayed - lr * (_local(m) / (1 - b1**n)) / root)

    with _adam(change):
        yield


@fault(stage="actor_update", cause=("optimizer", "hyperparameter"), needs={"updates": 2})
def second_moments_forget_sooner(site: Site):
    groups = site.optimizer.param_groups
    kept = [group["betas"] for group in groups]
    for group in groups:
        group["betas"] = (group["betas"][0], 0.95)
    yield
    for group, betas in zip(groups, kept, strict=True):
        group["betas"] = betas


@fault(stage="critic_update", cause="optimizer")
def decay_goes_through_the_gradient(site: Site):
    def change(right, *args, **kwargs):
        kwargs["decoupled_weight_decay"] = False
        return right(*args, **kwargs)

    with _adam(change):
        yield


@fault(stage="actor_update", cause="optimizer", needs={"updates": 2})
def parameters_clipped_one_by_one(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.fsdp2_clip_grad_norm_

    def clip(parameters, max_norm, **kwargs):
        parameters = list(parameters)
        total = right(parameters, float("inf"), **kwargs)
        for p in parameters:
            if p.grad is not None:
                d = _local(p.grad)
                d.mul_((max_norm / (d.norm() + 1e-6)).clamp(max=1.0))
        return total

    with swapped(engine, "fsdp2_clip_grad_norm_", clip):
        yield


@fault(stage="critic_update", cause="optimizer")
def norm_of_matrices_alone(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as engine
    from torch.nn.utils.clip_grad import _clip_grads_with_norm_

    right = engine.fsdp2_clip_grad_norm_

    def clip(parameters, max_norm, **kwargs):
        parameters = list(parameters)
        total = right([p for p in parameters if p.dim() > 1], max_norm, **kwargs)
        _clip_grads_with_norm_([p for p in parameters if p.dim() == 1], max_norm, total)
        return total

    with swapped(engine, "fsdp2_clip_grad_norm_", clip):
        yield


@fault(stage="critic_update", module=L + "0.self_attn.v_proj", cause="optimizer")
def step_skips_unfilled_blocks(site: Site):
    def change(right, params, *args, **kwargs):
        tails = []
        for p in params:
            flat = _local(p).detach().view(-1)
            tail = flat[len(flat) - len(flat) % 64 :]
            tails.append((tail, tail.clone()))
        right(params, *args, **kwargs)
        for tail, old in tails:
            tail.copy_(old)

    with _adam(change):
        yield


@fault(stage="actor_update", cause=("reduction", "rounding_order"), needs={"world_size": 2})
def gradients_travel_in_bf16(site: Site):
    right = dist.reduce_scatter_single

    def short(output, input, **kwargs):
        input.copy_(input.bfloat16().to(input.dtype))
        return right(output=output, input=input, **kwargs)

    with swapped(dist, "reduce_scatter_single", short):
        yield


@fault(
    stage="actor_compute_log_prob",
    module=L + "1.mlp.experts",
    cause="routing",
    needs={"model": "moe"},
)
def full_experts_drop_tokens(site: Site):
    m = site.model.get_submodule(L + "1.mlp.experts")
    right = m.forward

    def forward(x, chosen, weights):
        flat = torch.nn.functional.one_hot(chosen.reshape(-1), m.num_experts)
        place = (flat.cumsum(0) * flat).sum(-1).view_as(chosen)
        room = chosen.numel() // m.num_experts
        return right(x, chosen, weights.masked_fill(place > room, 0.0))

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="actor_update",
    module=L + "1.self_attn.q_proj",
    cause=("hyperparameter", "constant_factor"),
    needs={"lora": True},
)
def adapter_scaled_by_root_of_rank(site: Site):
    (layer,) = [
        m
        for name, m in site.model.named_modules()
        if name.endswith("layers.1.self_attn.q_proj") and hasattr(m, "scaling")
    ]
    kept = dict(layer.scaling)
    for name, scale in kept.items():
        layer.scaling[name] = scale * layer.r[name] ** 0.5
    yield
    layer.scaling.update(kept)


@fault(stage="actor_update", cause="accumulation", needs={"updates": 2})
def gradients_not_zeroed_between_updates(site: Site):
    import verl.workers.engine.fsdp.transformer_impl as engine

    kind = engine.FSDPEngine
    right, calls = kind.optimizer_zero_grad, []

    def zero(self):
        calls.append(1)
        if len(calls) != 2:
            right(self)

    with swapped(kind, "optimizer_zero_grad", zero):
        yield
