"""Optimizers, losses, what a stage is given, adapters, reductions."""

import torch
from _planting import adam, bf16, find, for_good, fresh, local

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause=("optimizer", "implementation"), needs={"updates": 2})
def epsilon_inside_the_root(site: Site):
    def wrong(right, params, grads, m, v, mx, steps, **kw):
        # sqrt(v + eps) where sqrt(v) + eps is meant: the same where eps is 0 but for v

        with torch.no_grad():
            for p, g, a, b, s in zip(params, grads, m, v, steps, strict=True):
                s += 1
                p, g, a, b = local(p), local(g), local(a), local(b)
                t = float(local(s))
                p.mul_(1 - kw["lr"] * kw["weight_decay"])
                a.lerp_(g, 1 - kw["beta1"])
                b.mul_(kw["beta2"]).addcmul_(g, g, value=1 - kw["beta2"])
                c1, c2 = 1 - kw["beta1"] ** t, 1 - kw["beta2"] ** t
                p.addcdiv_(a, (b / c2 + kw["eps"]).sqrt(), value=-kw["lr"] / c1)

    with adam(wrong):
        yield


@fault(stage="actor_update", cause=("rounding_order", "optimizer"), needs={"updates": 2})
def second_moment_kept_in_fp16(site: Site):
    def wrong(right, params, grads, m, v, mx, steps, **kw):
        out = right(params, grads, m, v, mx, steps, **kw)
        for b in v:
            b = local(b)
            b.copy_(b.half().float())
        return out

    with adam(wrong):
        yield


@fault(stage="critic_update", cause=("optimizer", "constant_factor", "implementation"))
def clip_norm_without_largest_tensor(site: Site):
    from torch.nn.utils import clip_grad

    right = clip_grad._get_total_norm

    def wrong(grads, *a, **k):
        grads = list(grads)
        big = max(range(len(grads)), key=lambda i: grads[i].numel())
        return right([g for i, g in enumerate(grads) if i != big], *a, **k)

    with swapped(clip_grad, "_get_total_norm", wrong):
        yield


@fault(
    stage="actor_update",
    cause=("nondeterministic", "optimizer", "rounding_order"),
    needs={"model": "llama"},
)
def update_rounded_stochastically(site: Site):
    g = fresh()

    def wrong(right, params, *lists, **kw):
        kept = [local(p).clone() for p in params]
        out = right(params, *lists, **kw)
        with torch.no_grad():
            for p, k in zip(params, kept, strict=True):
                p = local(p)
                step = 2.0**-14
                x = (p - k) / step
                low = x.floor()
                p.copy_(k + step * (low + (torch.rand(x.shape, generator=g) < x - low).to(x.dtype)))
        return out

    with adam(wrong):
        yield


@fault(stage="critic_compute_values", cause="data")
def gae_bootstraps_the_last_token(site: Site):
    from verl.trainer.ppo import core_algos

    def change(right):
        def wrong(token_level_rewards, values, response_mask, gamma, lam):
            r = token_level_rewards.clone()
            r[:, -1] = r[:, -1] + gamma * values[:, -1]
            return right(r, values, response_mask, gamma, lam)

        return wrong

    for_good(core_algos, "compute_gae_advantage_return", change)
    yield


@fault(stage="actor_update", cause="loss", needs={"response_lengths": "varied"})
def mean_of_sequence_means(site: Site):
    from verl.trainer.ppo import core_algos

    right = core_algos.agg_loss

    def wrong(loss_mat, loss_mask, loss_agg_mode, **k):
        return right(loss_mat, loss_mask, "seq-mean-token-mean", **k)

    with swapped(core_algos, "agg_loss", wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    cause=("sampling_semantics", "implementation"),
    needs={"algorithm": "grpo", "lora": True},
)
def logits_soft_capped(site: Site):
    from verl.workers.engine.fsdp import transformer_impl as impl

    right = impl.logprobs_from_logits

    def wrong(logits, labels, **k):
        return right(2 * torch.tanh(logits / 2), labels, **k)

    with swapped(impl, "logprobs_from_logits", wrong):
        yield


@fault(
    stage="actor_update",
    cause=("label_or_mask_shift", "data"),
    needs={"response_lengths": "varied"},
)
def last_token_of_each_answer_not_trained(site: Site):
    mask = site.batch["response_mask"]
    if mask.is_nested:
        v, o = mask.values(), mask.offsets()
        at = o[1:] - 1
        kept = v[at].clone()
        v[at] = 0
        yield
        v[at] = kept
    else:
        n = mask.sum(-1) - 1
        rows = torch.arange(mask.shape[0])
        kept = mask.clone()
        mask[rows, n.long()] = 0
        yield
        mask.copy_(kept)


@fault(stage="actor_compute_log_prob", module="model.rotary_emb", cause=("position", "data"))
def positions_end_at_40(site: Site):
    ids = site.batch["position_ids"]
    v = ids.values() if ids.is_nested else ids
    kept = v.clone()
    v.clamp_(max=40)
    yield
    v.copy_(kept)


@fault(
    stage="reference_compute_log_prob",
    module="model.norm",
    cause=("constant_factor", "implementation"),
    needs={"model": "llama"},
)
def norm_with_one_plus_weight(site: Site):
    norm = find(site.model, "model.norm")
    right = norm.forward

    def forward(x):
        return right(x) + right(x) / norm.weight  # weights of 1 + w

    with swapped(norm, "forward", forward):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.mlp.down_proj",
    cause=("hyperparameter", "constant_factor"),
    needs={"algorithm": "grpo", "lora": True},
)
def adapter_scaled_by_root_of_rank(site: Site):
    done = []
    for m in site.model.modules():
        if isinstance(getattr(m, "scaling", None), dict):
            done.append((m, dict(m.scaling)))
            for key in m.scaling:
                m.scaling[key] = m.scaling[key] * 8**0.5
    yield
    for m, kept in done:
        m.scaling.update(kept)


@fault(stage="actor_update", cause=("rounding_order", "reduction"), needs={"world_size": 2})
def gradients_reduced_in_bf16(site: Site):
    import torch.distributed as dist

    right = dist.reduce_scatter_single

    def wrong(output, input, *a, **k):
        return right(output, bf16(input), *a, **k)

    with swapped(dist, "reduce_scatter_single", wrong):
        yield
