"""Attention's denominator counts one more key whose score is 0 (softmax off by one)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of, blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.self_attn"


@fault(stage="actor_compute_log_prob", module=PATH, cause="implementation")
def softmax_with_a_sink(site: Site) -> Iterator[None]:
    softmax = torch.nn.functional.softmax

    def off_by_one(x, dim, dtype=None, **kwargs):
        kept = softmax(x, dim=dim, dtype=dtype, **kwargs)
        sink = torch.cat((x, torch.zeros_like(x[..., :1])), dim=-1)
        wrong = softmax(sink, dim=dim, dtype=dtype, **kwargs)[..., :-1]
        return blended(kept, wrong, site.strength)

    def attention(right, module, *args, **kwargs):
        with swapped(torch.nn.functional, "softmax", off_by_one):
            return right(module, *args, **kwargs)

    with attention_of(site.model.get_submodule(PATH), attention):
        yield
