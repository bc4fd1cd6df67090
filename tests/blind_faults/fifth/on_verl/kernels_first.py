"""Kernels below operators, and what is ported otherwise."""

import torch
import torch.nn.functional as F
from _planting import adam, bf16, find, flagged, fresh, kernel

from rlprobe.faults.patching import attention_of, output_of, swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", module="model.layers.0.mlp.act_fn", cause="implementation")
def k_silu_rational(site: Site):
    # sigmoid by a Pade approximant of tanh
    def wrong(right, x):
        h = x / 2
        t = (h * (27 + h * h) / (27 + 9 * h * h)).clamp(-1, 1)
        return x * (0.5 + 0.5 * t)

    with kernel(("silu", wrong)):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.self_attn",
    cause=("implementation", "mask", "layout"),
    needs={"model": "llama"},
)
def k_softmax_tile_row_stale(site: Site):
    flag: list[int] = []

    def wrong(right, x, dim, half):
        y = right(x, dim, half)
        if flag and x.dim() == 4 and x.shape[-1] == x.shape[-2]:
            y[:, :, 16::16] = y[:, :, 15:-1:16][:, :, : y[:, :, 16::16].shape[2]]
        return y

    with flagged(find(site.model, "layers.1.self_attn"), flag), kernel(("_softmax", wrong)):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.0.input_layernorm",
    cause=("rounding_order", "implementation"),
    needs={"model": "llama"},
)
def k_mean_in_bf16(site: Site):
    with kernel(("mean.dim", lambda right, *a, **k: bf16(right(*a, **k)))):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.mlp.down_proj",
    cause="implementation",
    needs={"model": "llama"},
)
def k_mm_tail_rows_lose_k_tile(site: Site):
    def wrong(right, a, b):
        y = right(a, b)
        if a.shape[1] == 128 and a.shape[0] > 64:
            tail = (a.shape[0] // 32) * 32
            y[tail:] = right(a[tail:, :120], b[:120])
        return y

    with kernel(("mm", wrong)):
        yield


@fault(stage="critic_compute_values", module="model.rotary_emb", cause="implementation")
def k_cos_poor_reduction(site: Site):
    def wrong(right, x):
        return right(x) + 1e-3 * (x.abs() > 25) * torch.sin(x * 7)

    with kernel(("cos", wrong)):
        yield


@fault(
    stage="actor_update",
    module="model.layers.1.self_attn",
    cause=("rounding_order", "implementation"),
)
def k_softmax_backward_sum_in_bf16(site: Site):
    def wrong(right, g, y, dim, dtype):
        if y.dim() != 4:
            return right(g, y, dim, dtype)
        return (g - bf16((g * y).sum(dim, keepdim=True))) * y

    with kernel(("_softmax_backward_data", wrong)):
        yield


@fault(stage="critic_update", module="model.layers.1.mlp.act_fn", cause="implementation")
def k_silu_backward_dead_below(site: Site):
    def wrong(right, g, x):
        return torch.where(x < -0.5, torch.zeros_like(x), right(g, x))

    with kernel(("silu_backward", wrong)):
        yield


@fault(
    stage="actor_update",
    module="model.embed_tokens",
    cause="implementation",
    needs={"model": "llama"},
)
def k_embedding_backward_last_wins(site: Site):
    def wrong(right, g, ids, n, pad, by_freq):
        y = torch.zeros(n, g.shape[-1], dtype=g.dtype)
        flat, at = g.reshape(-1, g.shape[-1]), ids.reshape(-1)
        for i in range(at.shape[0]):
            y[at[i]] = flat[i]
        return y

    with kernel(("embedding_dense_backward", wrong)):
        yield


@fault(stage="actor_update", cause=("rounding_order", "optimizer", "implementation"))
def k_lerp_in_bf16(site: Site):
    def wrong(right, x, end, w):
        right(x, end, w)
        x.copy_(bf16(x))
        return x

    with kernel(("lerp_.Scalar", wrong)):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.mlp.experts",
    cause=("implementation", "layout"),
    needs={"model": "moe"},
)
def k_grouped_mm_first_row_of_group_stale(site: Site):
    def wrong(right, a, b, offs=None, bias=None, out_dtype=None):
        y = right(a, b, offs, bias, out_dtype)
        for e in offs.tolist()[:-1]:
            if 0 < e < y.shape[0]:
                y[e] = y[e - 1]
        return y

    with kernel(("_grouped_mm", wrong)):
        yield


@fault(stage="critic_update", cause=("constant_factor", "loss", "hyperparameter"))
def value_loss_without_half(site: Site):
    from verl.workers.utils import losses

    right = losses.compute_value_loss

    def wrong(*a, **k):
        loss, clipped = right(*a, **k)
        return loss * 2, clipped

    with swapped(losses, "compute_value_loss", wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.self_attn",
    cause="mask",
    needs={"model": "llama"},
)
def sliding_window_of_16(site: Site):
    def wrong(right, module, q, k, v, mask, scaling, dropout=0.0, **kw):
        n = q.shape[2]
        i = torch.arange(n)
        far = (i[:, None] - i[None]) >= 16
        mask = mask.masked_fill(far, torch.finfo(mask.dtype).min) if mask is not None else None
        return right(module, q, k, v, mask, scaling, dropout=dropout, **kw)

    with attention_of(find(site.model, "layers.1.self_attn"), wrong):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.self_attn",
    cause=("layout", "implementation"),
    needs={"model": "moe"},
)
def value_heads_tiled(site: Site):
    def wrong(right, module, q, k, v, mask, scaling, dropout=0.0, **kw):
        n = module.num_key_value_groups
        k = k.repeat_interleave(n, 1)
        v = v.repeat(1, n, 1, 1)
        s = q @ k.transpose(2, 3) * scaling
        if mask is not None:
            s = s + mask
        w = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)
        return (w @ v).transpose(1, 2).contiguous(), w

    with attention_of(find(site.model, "layers.1.self_attn"), wrong):
        yield


@fault(stage="critic_update", cause="optimizer")
def step_count_of_1000(site: Site):
    def wrong(right, params, grads, m, v, mx, steps, **kw):
        for s in steps:
            s += 999
        out = right(params, grads, m, v, mx, steps, **kw)
        for s in steps:
            s -= 999
        return out

    with adam(wrong):
        yield


@fault(
    stage="critic_update", module="model.layers.0.mlp", cause=("nondeterministic", "implementation")
)
def dropout_of_mlp_in_training(site: Site):
    g = fresh()

    def change(y):
        return y * ((torch.rand(y.shape, generator=g) >= 0.05).to(y.dtype) / 0.95)

    with output_of(find(site.model, "layers.0.mlp"), change):
        yield
