"""Rotary embedding pairs neighbours (GPT-J's convention) instead of halves (Llama's)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.self_attn",
    cause=("implementation", "position", "layout"),
)
def rope_interleaved(site: Site) -> Iterator[None]:
    import transformers.models.qwen2.modeling_qwen2 as model

    right = model.apply_rotary_pos_emb

    def neighbours(x, cos, sin):
        half = x.shape[-1] // 2
        cos, sin = (
            cos[..., :half].repeat_interleave(2, -1),
            sin[..., :half].repeat_interleave(2, -1),
        )
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    def interleaved(q, k, cos, sin, *args, **kwargs):
        kept = right(q, k, cos, sin, *args, **kwargs)
        wrong = neighbours(q, cos, sin), neighbours(k, cos, sin)
        return tuple(blended(a, b, site.strength) for a, b in zip(kept, wrong, strict=True))

    with swapped(model, "apply_rotary_pos_emb", interleaved):
        yield
