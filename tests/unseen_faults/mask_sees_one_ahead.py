"""A causal mask whose diagonal is off by one: each token sees the next."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of, blended
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.self_attn"


@fault(stage="critic_update", module=PATH, cause="mask")
def mask_sees_one_ahead(site: Site) -> Iterator[None]:
    def ahead(right, module, query, key, value, mask, **kwargs):
        kept, weights = right(module, query, key, value, mask, **kwargs)
        never = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(2)
        shifted = torch.zeros_like(mask).masked_fill(never, torch.finfo(mask.dtype).min)
        wrong, seen = right(module, query, key, value, shifted, **kwargs)
        return blended(kept, wrong, site.strength), blended(weights, seen, site.strength)

    with attention_of(site.model.get_submodule(PATH), ahead):
        yield
