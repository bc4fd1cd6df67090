"""A norm multiplies by its weight before it rounds to bf16, and not after (verl-omni#637)."""

import contextlib
from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"precision": "bf16"})
def norm_casts_late(site: Site) -> Iterator[None]:
    def forward_of(norm):
        def forward(x):
            wide = x.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return (norm.weight.float() * (wide * scale)).to(x.dtype)

        return forward

    with contextlib.ExitStack() as stack:
        for module in site.model.modules():
            if hasattr(module, "variance_epsilon"):
                stack.enter_context(swapped(module, "forward", forward_of(module)))
        yield
