"""Attention multiplies queries and keys in bf16, everything else in fp32."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of, blended
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.self_attn"


@fault(stage="critic_compute_values", module=PATH, cause="rounding_order")
def queries_in_bf16(site: Site) -> Iterator[None]:
    def coarse(x):
        return blended(x, x.to(torch.bfloat16).to(x.dtype), site.strength)

    def rounded(right, module, query, key, value, mask, **kwargs):
        return right(module, coarse(query), coarse(key), value, mask, **kwargs)

    with attention_of(site.model.get_submodule(PATH), rounded):
        yield
