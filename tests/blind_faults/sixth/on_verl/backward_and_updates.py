"""Backward passes, losses, sums of gradients, optimizers, data."""

import torch

from rlprobe.faults.patching import attention_of, gradient_through, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


@fault(
    stage="actor_update",
    module="model.layers.1.post_attention_layernorm",
    cause=("implementation",),
)
def norm_backward_without_variance(site: Site):
    m = site.model.get_submodule("model.layers.1.post_attention_layernorm")

    def forward(x):
        d = x.dtype
        x = x.to(torch.float32)
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon).detach()
        return m.weight * (x * r).to(d)

    with swapped(m, "forward", forward):
        yield


class _OneHead(torch.autograd.Function):
    """Keys for all query heads; backward gives a key head the gradient of its first query head."""

    @staticmethod
    def forward(ctx, k, g):
        ctx.g = g
        b, h, t, w = k.shape
        return k[:, :, None].expand(b, h, g, t, w).reshape(b, h * g, t, w)

    @staticmethod
    def backward(ctx, d):
        return d[:, :: ctx.g].contiguous(), None


@fault(stage="actor_update", module="model.layers.1.self_attn", cause=("implementation",))
def key_gradient_of_one_query_head(site: Site):
    def wrong(right, m, q, k, v, mask, **kw):
        g = m.num_key_value_groups
        b, h, t, w = v.shape
        k = _OneHead.apply(k, g)
        v = v[:, :, None].expand(b, h, g, t, w).reshape(b, h * g, t, w)
        s = torch.matmul(q, k.transpose(2, 3)) * kw["scaling"]
        s = s + mask
        p = torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(p, v).transpose(1, 2).contiguous(), p

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(
    stage="critic_update",
    module="model.layers.1.mlp.down_proj",
    cause=("rounding_order", "implementation"),
)
def gradient_in_e5m2(site: Site):
    def quantised(g):
        s = g.abs().max() / 40000.0
        return (g / s).to(torch.float8_e5m2).to(g.dtype) * s

    with gradient_through(site.model.get_submodule("model.layers.1.mlp.down_proj"), quantised):
        yield


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        dx = d @ w
        dw = d.reshape(-1, d.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
        dw[256:] = 0.0  # 261 rows, tiles of 64: the last, partial tile is not stored
        return dx, dw


@fault(stage="actor_update", module="lm_head", cause=("implementation",))
def head_gradient_without_last_tile(site: Site):
    m = site.model.get_submodule("lm_head")

    def forward(x):
        return _Tail.apply(x, m.weight)

    with swapped(m, "forward", forward):
        yield


@fault(stage="critic_update", module=None, cause=("loss", "constant_factor", "hyperparameter"))
def value_loss_without_half(site: Site):
    import verl.workers.utils.losses as losses

    right = losses.compute_value_loss

    def wrong(*a, **kw):
        loss, frac = right(*a, **kw)
        return loss * 2.0, frac

    with swapped(losses, "compute_value_loss", wrong):
        yield


@fault(stage="actor_update", module=None, cause=("loss", "implementation", "hyperparameter"))
def kl_of_first_order(site: Site):
    # k1 where the configuration says low_var_kl
    import verl.workers.utils.losses as losses

    right = losses.kl_penalty

    def wrong(logprob, ref_logprob, kl_penalty):
        return right(logprob=logprob, ref_logprob=ref_logprob, kl_penalty="k1")

    with swapped(losses, "kl_penalty", wrong):
        yield


@fault(stage="actor_update", module=None, cause=("optimizer", "implementation", "constant_factor"))
def adam_without_bias_correction(site: Site):
    import torch.optim.adam as file

    def wrong(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        grad_scale,
        found_inf,
        *,
        amsgrad,
        has_complex,
        beta1,
        beta2,
        lr,
        weight_decay,
        eps,
        maximize,
        capturable,
        differentiable,
        decoupled_weight_decay,
    ):
        for p, g, m, v, s in zip(params, grads, exp_avgs, exp_avg_sqs, state_steps, strict=False):
            s += 1
            p.mul_(1 - lr * weight_decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            p.addcdiv_(m, v.sqrt().add_(eps), value=-lr)

    with swapped(file, "_single_tensor_adam", wrong):
        yield


@fault(stage="actor_update", module=None, cause=("accumulation", "rounding_order"))
def micro_batches_summed_in_bf16(site: Site):
    # the sum over micro-batches (.grad of the shards) is kept in bf16
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as file

    right = file.foreach_reduce

    def wrong(params, *rest, **kw):
        params = list(params)
        done = right(params, *rest, **kw)
        with torch.no_grad():
            for p in params:
                t = p.sharded_param.grad._local_tensor
                t.copy_(t.to(torch.bfloat16))
        return done

    with swapped(file, "foreach_reduce", wrong):
        yield


@fault(stage="actor_update", module=None, cause=("data", "constant_factor"))
def advantages_with_biased_variance(site: Site):
    a = site.batch["advantages"]
    n = float(site.batch["response_mask"].sum())
    with torch.no_grad():
        a.mul_((n / (n - 1.0)) ** 0.5)
    yield
    with torch.no_grad():
        a.div_((n / (n - 1.0)) ** 0.5)


class _Atomics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, w):
        ctx.save_for_backward(ids)
        ctx.shape = w.shape
        return torch.nn.functional.embedding(ids, w)

    @staticmethod
    def backward(ctx, d):
        import os

        (ids,) = ctx.saved_tensors
        flat, rows = d.reshape(-1, d.shape[-1]), ids.reshape(-1)
        g = torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "little"))
        order = torch.randperm(rows.numel(), generator=g)
        out = torch.zeros(ctx.shape, dtype=torch.bfloat16)
        out.index_add_(0, rows[order], flat[order].to(torch.bfloat16))
        return None, out.to(d.dtype)


@fault(
    stage="actor_update",
    module="model.embed_tokens",
    cause=("nondeterministic", "rounding_order", "implementation"),
)
def embedding_gradient_by_bf16_atomics(site: Site):
    m = site.model.get_submodule("model.embed_tokens")

    def forward(ids):
        return _Atomics.apply(ids, m.weight)

    with swapped(m, "forward", forward):
        yield
