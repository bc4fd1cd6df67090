"""Forward passes: scales, masks, positions, formats, layouts, chance."""

import torch

from rlprobe.faults.patching import attention_of, output_of, swapped
from rlprobe.selftest import Site, fault

L = "model.layers."


def eager(module, q, k, v, mask, scaling, probs):
    g = module.num_key_value_groups
    b, h, t, w = k.shape
    k = k[:, :, None].expand(b, h, g, t, w).reshape(b, h * g, t, w)
    v = v[:, :, None].expand(b, h, g, t, w).reshape(b, h * g, t, w)
    s = torch.matmul(q, k.transpose(2, 3)) * scaling
    if mask is not None:
        s = s + mask
    p = probs(s)
    return torch.matmul(p, v).transpose(1, 2).contiguous(), p


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.self_attn",
    cause=("hyperparameter", "rounding_order"),
)
def scale_times_log2e_in_bf16(site: Site):
    # a flash kernel folds scale * log2(e) into one constant, kept in bf16
    folded = 0.25 * 1.4426950408889634
    factor = float(torch.tensor(folded, dtype=torch.bfloat16)) / folded

    def wrong(right, m, q, k, v, mask, **kw):
        kw["scaling"] = kw["scaling"] * factor
        return right(m, q, k, v, mask, **kw)

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.self_attn",
    cause=("layout", "implementation"),
)
def kv_heads_tiled(site: Site):
    # query head h meets key/value head h % 2 instead of h // 2
    def wrong(right, m, q, k, v, mask, **kw):
        out, p = right(m, q[:, [0, 2, 1, 3]], k, v, mask, **kw)
        return out[:, :, [0, 2, 1, 3]].contiguous(), p[:, [0, 2, 1, 3]]

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.rotary_emb",
    cause=("position", "rounding_order", "hyperparameter"),
)
def rotary_frequencies_in_fp16(site: Site):
    r = site.model.get_submodule("model.rotary_emb")
    old = r.inv_freq
    r.inv_freq = old.to(torch.float16).to(torch.float32)
    yield
    r.inv_freq = old


@fault(
    stage="critic_compute_values",
    module="model.layers.0.self_attn",
    cause=("position", "layout", "implementation"),
)
def rope_pairs_interleaved(site: Site):
    # GPT-J's pairing (2i, 2i+1) where the weights are for halves (i, i+8)
    import transformers.models.qwen2.modeling_qwen2 as file

    def rot(x):
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    def wrong(q, k, cos, sin, unsqueeze_dim=1):
        h = cos.shape[-1] // 2
        cos = cos[..., :h].repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
        sin = sin[..., :h].repeat_interleave(2, dim=-1).unsqueeze(unsqueeze_dim)
        return (q * cos) + (rot(q) * sin), (k * cos) + (rot(k) * sin)

    with swapped(file, "apply_rotary_pos_emb", wrong):
        yield


@fault(
    stage="critic_compute_values",
    module="model.layers.0.self_attn",
    cause=("mask", "implementation"),
)
def causal_edge_one_ahead(site: Site):
    # k <= q + 1: a strict/non-strict mix-up in a tiled kernel
    def wrong(right, m, q, k, v, mask, **kw):
        moved = mask.clone()
        moved[..., 1:] = mask[..., :-1]
        moved[..., 0] = mask[..., 0]
        return right(m, q, k, v, moved, **kw)

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.0.self_attn",
    cause=("rounding_order", "implementation"),
)
def probabilities_in_fp16(site: Site):
    def wrong(right, m, q, k, v, mask, **kw):
        return eager(
            m,
            q,
            k,
            v,
            mask,
            kw["scaling"],
            lambda s: torch.softmax(s, dim=-1, dtype=torch.float32).to(torch.float16).to(q.dtype),
        )

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.1.mlp.up_proj",
    cause=("saturation", "implementation"),
)
def static_scale_too_small(site: Site):
    # a quantised output whose calibrated maximum is half of what comes
    def cut(x):
        return x.clamp(-6.0 * 0.5, 6.0 * 0.5)

    with output_of(site.model.get_submodule("model.layers.1.mlp.up_proj"), cut):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.self_attn.v_proj",
    cause=("weights", "rounding_order"),
)
def reference_v_proj_stored_in_fp16(site: Site):
    p = site.model.get_submodule("model.layers.1.self_attn.v_proj").weight
    t = getattr(p, "_local_tensor", p)
    with torch.no_grad():
        old = t.detach().clone()
        t.data.copy_(old.to(torch.float16).to(old.dtype))
    yield
    with torch.no_grad():
        t.data.copy_(old)


@fault(stage="critic_compute_values", module="score", cause=("nonfinite", "implementation"))
def uninitialised_lane_of_values(site: Site):
    def lane(x):
        x = x.clone()
        x[0, 40] = float("nan")
        return x

    with output_of(site.model.get_submodule("score"), lane):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause=("nondeterministic", "implementation"),
)
def dropout_left_on(site: Site):
    # attention dropout of a fused kernel that ignores eval()
    def wrong(right, m, q, k, v, mask, **kw):
        return eager(
            m,
            q,
            k,
            v,
            mask,
            kw["scaling"],
            lambda s: torch.dropout(
                torch.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), 0.02, True
            ),
        )

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), wrong):
        yield
