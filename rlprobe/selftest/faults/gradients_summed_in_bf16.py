"""Gradients are accumulated over micro-batches in bf16 (Megatron-LM fork#149)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause=("accumulation", "rounding_order"))
def gradients_summed_in_bf16(site: Site) -> Iterator[None]:
    def rounded(parameter):
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        with torch.no_grad():
            coarse = gradient.to(torch.bfloat16).to(gradient.dtype)
            gradient.copy_(blended(gradient, coarse, site.strength))

    handles = [p.register_post_accumulate_grad_hook(rounded) for p in site.model.parameters()]
    yield
    for handle in handles:
        handle.remove()
