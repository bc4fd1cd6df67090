"""Attention rounds its probabilities to bf16 before it weighs the values."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of, blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.self_attn"


@fault(stage="actor_compute_log_prob", module=PATH, cause="rounding_order")
def probabilities_in_bf16(site: Site) -> Iterator[None]:
    softmax = torch.nn.functional.softmax

    def coarse(x, *args, **kwargs):
        found = softmax(x, *args, **kwargs)
        return blended(found, found.to(torch.bfloat16).to(found.dtype), site.strength)

    def rounded(right, module, *args, **kwargs):
        with swapped(torch.nn.functional, "softmax", coarse):
            return right(module, *args, **kwargs)

    with attention_of(site.model.get_submodule(PATH), rounded):
        yield
