"""Backward passes of kernels whose forward is right."""

import contextlib
import sys

import numpy
import torch

from rlprobe.faults.patching import attention_of, gradient_through, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(x)

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return d * torch.sigmoid(x)


@fault(stage="actor_update", module=L + "1.mlp.act_fn", cause="implementation")
def silu_gradient_lacks_a_term(site: Site):
    m = site.model.get_submodule(L + "1.mlp.act_fn")
    with swapped(m, "forward", _Silu.apply):
        yield


@fault(stage="critic_update", module=L + "1.self_attn.v_proj", cause="implementation")
def bias_gradient_left_at_zero(site: Site):
    m = site.model.get_submodule(L + "1.self_attn.v_proj")

    def forward(x):
        return torch.nn.functional.linear(x, m.weight, m.bias.detach() + 0 * m.bias)

    with swapped(m, "forward", forward):
        yield


class _CoarseWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.nn.functional.linear(x, w)

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        a = d.reshape(-1, d.shape[-1]).bfloat16().float()
        b = x.reshape(-1, x.shape[-1]).bfloat16().float()
        return d @ w, a.t() @ b


@fault(stage="actor_update", module=L + "0.mlp.gate_proj", cause="rounding_order")
def weight_gradient_from_bf16_operands(site: Site):
    m = site.model.get_submodule(L + "0.mlp.gate_proj")

    def forward(x):
        return _CoarseWeightGradient.apply(x, m.weight)

    with swapped(m, "forward", forward):
        yield


def _half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return x * cos + _half(x) * sin

    @staticmethod
    def backward(ctx, d):
        cos, sin = ctx.saved_tensors
        return d * cos + _half(d) * sin, None, None


@contextlib.contextmanager
def _rotating(module, function):
    file, forward = sys.modules[type(module).__module__], module.forward

    def called(*args, **kwargs):
        with swapped(file, "apply_rotary_pos_emb", function):
            return forward(*args, **kwargs)

    with swapped(module, "forward", called):
        yield


@fault(stage="actor_update", module=L + "1.self_attn", cause="position")
def gradients_rotated_forward(site: Site):
    def rotate(q, k, cos, sin, *args, **kwargs):
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)

    with _rotating(site.model.get_submodule(L + "1.self_attn"), rotate):
        yield


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s):
        p = torch.softmax(s, -1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, d):
        (p,) = ctx.saved_tensors
        return p * d


@fault(stage="actor_update", module=L + "0.self_attn", cause="implementation")
def softmax_gradient_without_row_sums(site: Site):
    def wrong(right, module, query, key, value, mask, scaling, **kwargs):
        n = module.num_key_value_groups
        k, v = key.repeat_interleave(n, 1), value.repeat_interleave(n, 1)
        p = _Softmax.apply(query @ k.transpose(2, 3) * scaling + (0 if mask is None else mask))
        return (p @ v).transpose(1, 2).contiguous(), p

    with attention_of(site.model.get_submodule(L + "0.self_attn"), wrong):
        yield


@fault(stage="critic_update", module=L + "0.self_attn.o_proj", cause="layout")
def gradient_heads_in_reverse(site: Site):
    m = site.model.get_submodule(L + "0.self_attn.o_proj")

    def change(d):
        return d.unflatten(-1, (4, 16)).flip(-2).flatten(-2)

    with gradient_through(m, change):
        yield


class _Racing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return w * x

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        kept = numpy.random.default_rng().random(d.shape[:-1]) > 0.1
        rows = (d * x) * torch.from_numpy(kept)[..., None]
        return d * w, rows.flatten(0, -2).sum(0)


@fault(stage="critic_update", module="model.norm", cause="nondeterministic")
def gain_gradient_loses_racing_rows(site: Site):
    m = site.model.get_submodule("model.norm")

    def forward(x):
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
        return _Racing.apply((x.float() * r).to(x.dtype), m.weight)

    with swapped(m, "forward", forward):
        yield


@fault(stage="actor_update", module="lm_head", cause="rounding_order")
def head_gradient_in_fp16_without_subnormals(site: Site):
    def change(d):
        short = d.half().to(d.dtype)
        return short.masked_fill(short.abs() < 2.0**-14, 0.0)

    with gradient_through(site.model.get_submodule("lm_head"), change):
        yield
