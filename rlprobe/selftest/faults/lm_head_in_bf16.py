"""The last product runs in bf16 although the model runs in fp32."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="reference_compute_log_prob", module="lm_head", cause="rounding_order")
def lm_head_in_bf16(site: Site) -> Iterator[None]:
    head = site.model.get_submodule("lm_head")
    right = head.forward

    def forward(x):
        weight = head.weight.to(torch.bfloat16)
        wrong = torch.nn.functional.linear(x.to(torch.bfloat16), weight).to(x.dtype)
        return blended(right(x), wrong, site.strength)

    with swapped(head, "forward", forward):
        yield
