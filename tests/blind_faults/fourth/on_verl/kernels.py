"""Faults within a kernel: the operators that run are the same.

The aten operator keeps its name, arguments, shapes and formats; its CPU kernel is replaced.
"""

import os
from contextlib import contextmanager

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign, fault


@contextmanager
def kernel(*pairs):
    lib = torch.library.Library("aten", "IMPL")
    for name, wrong in pairs:
        lib.impl(name, wrong, "CPU", allow_override=True)
    try:
        yield
    finally:
        lib._destroy()


def soft(x, dim):
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause=("rounding_order", "implementation"),
)
def k_softmax_in_bf16(site: Site):
    def wrong(x, dim, half_to_float):
        p = soft(x, dim)
        return p.bfloat16().to(p.dtype)

    with kernel(("_softmax", wrong)):
        yield


@fault(
    stage="critic_compute_values", module="model.layers.0.self_attn.q_proj", cause="implementation"
)
def k_addmm_loses_last_block(site: Site):
    def wrong(bias, a, b, *, beta=1, alpha=1):
        k = a.shape[-1]
        k = k - 8 if k >= 64 else k
        return torch.mm(a[:, :k], b[:k]) + bias

    with kernel(("addmm", wrong)):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.input_layernorm",
    cause="implementation",
    needs={"model": "llama"},
)
def k_rsqrt_fast(site: Site):
    def wrong(x):
        i = x.float().contiguous().view(torch.int32)
        y = (0x5F3759DF - (i >> 1)).view(torch.float32)
        return (y * (1.5 - 0.5 * x.float() * y * y)).to(x.dtype)

    with kernel(("rsqrt", wrong)):
        yield


@fault(stage="critic_update", module="model.layers.1.mlp.act_fn", cause="implementation")
def k_silu_backward_crude(site: Site):
    def wrong(d, x):
        return d * torch.sigmoid(x)

    def into(d, x, *, grad_input):
        return grad_input.copy_(d * torch.sigmoid(x))

    with kernel(("silu_backward", wrong), ("silu_backward.grad_input", into)):
        yield


@fault(
    stage="actor_update",
    module="model.embed_tokens",
    cause="nondeterministic",
    needs={"algorithm": "grpo"},
)
def k_embedding_backward_races(site: Site):
    g = torch.Generator()
    g.manual_seed(int.from_bytes(os.urandom(7), "little"))

    def wrong(d, indices, num_weights, padding_idx, scale_grad_by_freq):
        flat, at = d.flatten(0, -2), indices.flatten()
        lost = torch.rand(at.shape, generator=g) < 0.05
        out = torch.zeros(num_weights, d.shape[-1], dtype=d.dtype)
        return out.index_add_(0, at[~lost], flat[~lost])

    with kernel(("embedding_dense_backward", wrong)):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.self_attn",
    cause="implementation",
    needs={"model": "llama"},
)
def k_softmax_backward_lacks_sum(site: Site):
    def wrong(d, p, dim, input_dtype):
        return d * p

    with kernel(("_softmax_backward_data", wrong)):
        yield


@fault(stage="critic_update", cause=("optimizer", "rounding_order"))
def k_second_moment_in_bf16(site: Site):
    def wrong(self, a, b, *, value=1):
        return self.copy_((self + value * a * b).bfloat16().to(self.dtype))

    with kernel(("addcmul_", wrong)):
        yield


@fault(
    stage="reference_compute_log_prob",
    cause=("sampling_semantics", "implementation"),
    needs={"algorithm": "grpo"},
)
def k_logsumexp_loses_tail(site: Site):
    def wrong(x, dim, keepdim=False):
        if x.shape[-1] > 256:
            x = x[..., :256]
        top = x.amax(dim, keepdim=True)
        out = top + torch.log(torch.exp(x - top).sum(dim, keepdim=True))
        return out if keepdim else out.squeeze(-1)

    with kernel(("logsumexp", wrong)):
        yield


@fault(
    stage="actor_compute_log_prob", module="model.rotary_emb", cause=("rounding_order", "position")
)
def k_bmm_in_bf16(site: Site):
    def wrong(a, b):
        a, b = a.bfloat16().float(), b.bfloat16().float()
        return torch.stack([torch.mm(x, y) for x, y in zip(a, b, strict=True)])

    with kernel(("bmm", wrong)):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.mlp.experts",
    cause="implementation",
    needs={"model": "moe"},
)
def k_grouped_mm_loses_last_rows(site: Site):
    def wrong(a, b, offs=None, bias=None, out_dtype=None):
        parts, start = [], 0
        for e, end in enumerate(offs.tolist()):
            part = torch.mm(a[start:end], b[e])
            if end > start and (end - start) % 8:
                part[-((end - start) % 8) :] = 0
            parts.append(part)
            start = end
        out = torch.cat(parts)
        return (
            out
            if out.shape[0] == a.shape[0]
            else torch.cat([out, out.new_zeros(a.shape[0] - out.shape[0], out.shape[1])])
        )

    with kernel(("_grouped_mm", wrong)):
        yield


@fault(stage="critic_compute_values", module="model.layers.0.mlp.act_fn", cause="saturation")
def k_silu_saturates(site: Site):
    def wrong(x):
        x = x.clamp(max=1.0)
        return x * torch.sigmoid(x)

    with kernel(("silu", wrong)):
        yield


@fault(stage="actor_update", cause=("loss", "hyperparameter"), needs={"updates": 2})
def kl_of_squares(site: Site):
    """k2 for k3: value and gradient are both 0 in the first update."""
    from verl.workers.utils import losses

    def wrong(logprob, ref_logprob, kl_penalty):
        return 0.5 * (logprob - ref_logprob) ** 2

    with swapped(losses, "kl_penalty", wrong):
        yield


@fault(stage="actor_update", cause=("loss", "hyperparameter", "saturation"), needs={"updates": 2})
def clip_range_of_a_tenth(site: Site):
    """The ratio is 1 in the first update, so that no clipping shows there."""
    from verl.workers.utils import losses

    right = losses.get_policy_loss_fn

    def named(name):
        fn = right(name)

        def wrong(*, config, **kw):
            import copy

            other = copy.copy(config)
            for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
                if getattr(other, key, None) is not None:
                    object.__setattr__(other, key, getattr(other, key) / 10)
            return fn(config=other, **kw)

        return wrong

    with swapped(losses, "get_policy_loss_fn", named):
        yield


@benign()
def k_softmax_by_powers_of_two(site: Site):
    def other(x, dim, half_to_float):
        e = torch.exp2((x - x.amax(dim, keepdim=True)) * 1.4426950408889634)
        return e * (1 / e.sum(dim, keepdim=True))

    with kernel(("_softmax", other)):
        yield
