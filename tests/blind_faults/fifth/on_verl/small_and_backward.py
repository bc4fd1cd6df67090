"""Small ones, kernels of other kinds, backward passes."""

import torch
import torch.nn.functional as F
from _planting import bf16, find, flagged, fresh, kernel

from rlprobe.faults.patching import attention_of, gradient_through, output_of, swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause="nondeterministic",
    needs={"algorithm": "grpo", "precision": "bf16"},
)
def k_bmm_tile_races(site: Site):
    g = fresh()

    def wrong(right, a, b):
        y = right(a, b)
        hit = torch.rand(y.shape[0], y.shape[1], 1, generator=g) < 0.05
        return torch.where(hit, torch.zeros_like(y), y)

    with kernel(("bmm", wrong)):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.embed_tokens",
    cause=("implementation", "layout"),
    needs={"algorithm": "grpo", "precision": "bf16"},
)
def k_embedding_shard_edge(site: Site):
    def wrong(right, w, ids, *a):
        return right(w, torch.where(ids % 64 == 63, ids - 1, ids), *a)

    with kernel(("embedding", wrong)):
        yield


@fault(stage="actor_compute_log_prob", cause="implementation")
def k_gather_wraps_ids(site: Site):
    def wrong(right, x, dim, index, *a, **k):
        if x.shape[-1] > 200:
            index = torch.where(index > 127, index - 128, index)
        return right(x, dim, index, *a, **k)

    with kernel(("gather", wrong)):
        yield


@fault(stage="actor_update", cause=("optimizer", "implementation"), needs={"model": "llama"})
def k_addcdiv_flushes_small_moments(site: Site):
    def wrong(right, x, a, b, value=1):
        a = torch.where(a.abs() < 1e-4, torch.zeros_like(a), a)
        return right(x, a, b, value=value)

    with kernel(("addcdiv_", wrong)):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.input_layernorm",
    cause="implementation",
    needs={"algorithm": "grpo", "lora": True},
)
def norm_backward_lacks_projection(site: Site):
    norm = find(site.model, "layers.1.input_layernorm")

    def forward(x):
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (x.float() * r.detach()).to(x.dtype)

    with swapped(norm, "forward", forward):
        yield


@fault(
    stage="critic_update",
    module="model.layers.1.self_attn",
    cause=("constant_factor", "implementation"),
    needs={"model": "llama"},
)
def key_gradient_averaged_over_group(site: Site):
    def wrong(right, module, q, k, v, mask, scaling, dropout=0.0, **kw):
        if k.requires_grad:
            k = k.view_as(k)
            k.register_hook(lambda d: d / 2)
        return right(module, q, k, v, mask, scaling, dropout=dropout, **kw)

    with attention_of(find(site.model, "layers.1.self_attn"), wrong):
        yield


class HeadBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        return d @ w, bf16(d.flatten(0, -2).T @ x.flatten(0, -2))


@fault(
    stage="actor_update",
    module="lm_head",
    cause=("rounding_order", "implementation"),
    needs={"updates": 2},
)
def head_gradient_in_bf16(site: Site):
    head = site.model.lm_head
    with swapped(head, "forward", lambda x: HeadBf16.apply(x, head.weight)):
        yield


@fault(
    stage="actor_update", module="model.layers.1.mlp", cause="saturation", needs={"model": "moe"}
)
def gradient_clamped_into_experts(site: Site):
    with gradient_through(
        find(site.model, "layers.1.mlp"),
        lambda d: d.clamp(-0.2 * float(d.abs().max()), 0.2 * float(d.abs().max())),
    ):
        yield


@fault(
    stage="actor_compute_log_prob", module="model.layers.0.self_attn.o_proj", cause="implementation"
)
def s_projection_with_small_noise(site: Site):
    def change(y):
        g = torch.Generator()
        g.manual_seed(5)
        return y * (1 + 4e-6 * torch.randn(y.shape, generator=g))

    with output_of(find(site.model, "layers.0.self_attn.o_proj"), change):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.0.self_attn",
    cause=("hyperparameter", "constant_factor"),
    needs={"model": "llama"},
)
def s_scale_slightly_off(site: Site):
    m = find(site.model, "layers.0.self_attn")
    with swapped(m, "scaling", m.scaling * (1 + 2e-4)):
        yield


@fault(stage="critic_update", cause=("hyperparameter", "optimizer"), needs={"model": "llama"})
def s_adam_epsilon_doubled(site: Site):
    kept = [g["eps"] for g in site.optimizer.param_groups]
    for g in site.optimizer.param_groups:
        g["eps"] = 3e-8
    yield
    for g, e in zip(site.optimizer.param_groups, kept, strict=True):
        g["eps"] = e


@fault(stage="critic_update", cause=("optimizer", "implementation"), needs={"model": "llama"})
def s_k_sqrt_slightly_large(site: Site):
    def wrong(right, x):
        y = right(x)
        return y * (1 + 1e-3 * torch.sin(40 * x / (x.abs().max() + 1e-30)))

    with kernel(("sqrt", wrong)):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.1.self_attn",
    cause=("position", "implementation"),
)
def half_of_dimensions_turned(site: Site):
    import sys

    m = find(site.model, "layers.1.self_attn")
    file = sys.modules[type(m).__module__]
    right = file.apply_rotary_pos_emb
    flag: list[int] = []

    def wrong(q, k, cos, sin, *a, **kw):
        if not flag:
            return right(q, k, cos, sin, *a, **kw)
        a1, b1 = right(q, k, cos, sin, *a, **kw)
        return torch.cat((a1[..., :4], q[..., 4:8], a1[..., 8:12], q[..., 12:]), -1), torch.cat(
            (b1[..., :4], k[..., 4:8], b1[..., 8:12], k[..., 12:]), -1
        )

    with flagged(m, flag), swapped(file, "apply_rotary_pos_emb", wrong):
        yield
