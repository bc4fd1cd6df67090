"""Backward passes whose forward is right."""

import numpy
import torch
from _shared import log_probs, scores_of, summed

from rlprobe.faults.patching import attention_of, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


class _Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, normed, weight):
        ctx.save_for_backward(x, weight)
        return weight * normed

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        return None, d * weight, (d * x).flatten(0, -2).sum(0)


@fault(stage="critic_update", module=L + "1.post_attention_layernorm", cause="implementation")
def gain_gradient_from_raw_inputs(site: Site):
    m = site.model.get_submodule(L + "1.post_attention_layernorm")

    def forward(x):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
        return _Gain.apply(x.detach(), x * root, m.weight)

    with swapped(m, "forward", forward):
        yield


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, active, up, gate):
        ctx.save_for_backward(up, gate)
        return active * up

    @staticmethod
    def backward(ctx, d):
        up, gate = ctx.saved_tensors
        return d * up, d * gate, None


@fault(
    stage="critic_update",
    module=L + "0.mlp",
    cause="implementation",
    needs={"precision": "bf16"},
)
def up_gradient_takes_the_raw_gate(site: Site):
    m = site.model.get_submodule(L + "0.mlp")

    def forward(x):
        gate = m.gate_proj(x)
        return m.down_proj(_Product.apply(m.act_fn(gate), m.up_proj(x), gate.detach()))

    with swapped(m, "forward", forward):
        yield


class _WithoutDiagonal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        return p.view_as(p)

    @staticmethod
    def backward(ctx, d):
        return d.masked_fill(torch.eye(d.shape[-1], dtype=torch.bool), 0.0)


@fault(stage="critic_update", module=L + "1.self_attn", cause=("mask", "implementation"))
def diagonal_masked_in_backward(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        s = _WithoutDiagonal.apply(scores_of(module, query, key, mask, scaling))
        return summed(module, torch.softmax(s, -1), value)

    with attention_of(site.model.get_submodule(L + "1.self_attn"), wrong):
        yield


class _NeighboursSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s):
        ctx.save_for_backward(s)
        return torch.softmax(s, -1)

    @staticmethod
    def backward(ctx, d):
        (s,) = ctx.saved_tensors
        right = torch.softmax(s, -1)
        again = torch.exp(s - torch.logsumexp(s, -1, keepdim=True).roll(1, 1))
        return again * (d - (d * right).sum(-1, keepdim=True))


@fault(
    stage="actor_update",
    module=L + "0.self_attn",
    cause=("implementation", "layout"),
    needs={"model": "llama"},
)
def backward_takes_the_next_heads_log_sum(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        s = scores_of(module, query, key, mask, scaling)
        return summed(module, _NeighboursSum.apply(s), value)

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


class _RacingHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, groups):
        ctx.groups = groups
        return key.repeat_interleave(groups, 1)

    @staticmethod
    def backward(ctx, d):
        kept = torch.from_numpy(numpy.random.default_rng().random(tuple(d.shape[:-1])) > 0.03)
        return (d * kept[..., None]).unflatten(1, (-1, ctx.groups)).sum(2), None


@fault(
    stage="actor_update",
    module=L + "1.self_attn",
    cause=("nondeterministic", "implementation"),
)
def key_gradients_lose_racing_adds(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        keys = _RacingHeads.apply(key, module.num_key_value_groups)
        s = query @ keys.transpose(2, 3) * scaling
        s = s if mask is None else s + mask
        return summed(module, torch.softmax(s, -1), value)

    with attention_of(site.model.get_submodule(L + "1.self_attn"), wrong):
        yield


class _ShortProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, found):
        ctx.save_for_backward(torch.softmax(logits, -1).half(), labels)
        return found.view_as(found)

    @staticmethod
    def backward(ctx, d):
        short, labels = ctx.saved_tensors
        each = -short.to(d.dtype)
        each.scatter_add_(-1, labels[:, None], torch.ones_like(d)[:, None])
        return each * d[:, None], None, None


@fault(stage="actor_update", cause=("rounding_order", "implementation", "loss"))
def log_prob_gradient_from_fp16_probabilities(site: Site):
    def change(right, logits, labels):
        return _ShortProbabilities.apply(logits, labels, right(logits.detach(), labels))

    with log_probs(change):
        yield


class _AmongTheChosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, scores, chosen):
        ctx.save_for_backward(scores, chosen)
        ctx.shape = logits.shape
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, d):
        scores, chosen = ctx.saved_tensors
        inner = scores * (d - (scores * d).sum(-1, keepdim=True))
        return inner.new_zeros(ctx.shape).scatter(-1, chosen, inner), None, None


@fault(
    stage="actor_update",
    module=L + "0.mlp.gate",
    cause=("implementation", "routing"),
    needs={"model": "moe"},
)
def router_gradient_among_the_chosen(site: Site):
    m = site.model.get_submodule(L + "0.mlp.gate")
    right = m.forward

    def forward(x):
        logits, scores, chosen = right(x)
        return logits, _AmongTheChosen.apply(logits, scores.detach(), chosen), chosen

    with swapped(m, "forward", forward):
        yield


@fault(
    stage="actor_update",
    module=L + "1.mlp.gate",
    cause=("nondeterministic", "routing"),
    needs={"model": "moe"},
)
def router_jitter_left_on(site: Site):
    m = site.model.get_submodule(L + "1.mlp.gate")
    right, draw = m.forward, numpy.random.default_rng()

    def forward(x):
        jitter = torch.from_numpy(draw.uniform(0.99, 1.01, tuple(x.shape)))
        return right(x * jitter.to(x.dtype))

    with swapped(m, "forward", forward):
        yield
