"""Attention loses keys more than 8 tokens back (vllm-ascend#15503: a mask that ends too early)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of, blended
from rlprobe.selftest import Site, fault

WINDOW = 8


@fault(stage="critic_compute_values", module="model.layers.1.self_attn", cause="mask")
def window_too_short(site: Site) -> Iterator[None]:
    def windowed(right, module, query, key, value, mask, **kwargs):
        whole, weights = right(module, query, key, value, mask, **kwargs)
        far = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(-WINDOW)
        shorter = mask.masked_fill(far, torch.finfo(mask.dtype).min)
        partial, seen = right(module, query, key, value, shorter, **kwargs)
        return blended(whole, partial, site.strength), blended(weights, seen, site.strength)

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), windowed):
        yield
