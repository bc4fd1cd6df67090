"""Norms compute their statistics in double precision."""

import contextlib
from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"algorithm": "grpo"})
def norms_in_double(site: Site) -> Iterator[None]:
    def forward_of(norm):
        def forward(x):
            wide = x.double()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return norm.weight * (wide * scale).to(x.dtype)

        return forward

    with contextlib.ExitStack() as stack:
        for module in site.model.modules():
            if hasattr(module, "variance_epsilon"):
                stack.enter_context(swapped(module, "forward", forward_of(module)))
        yield
