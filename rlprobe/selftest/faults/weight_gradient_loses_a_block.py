"""A weight gradient misses the last rows of its sum: a block size that does not divide."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.mlp.gate_proj"


@fault(stage="actor_update", module=PATH, cause="implementation")
def weight_gradient_loses_a_block(site: Site) -> Iterator[None]:
    module = site.model.get_submodule(PATH)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.nn.functional.linear(x, weight)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            kept = torch.ones(x.shape[1])
            kept[-x.shape[1] % 16 - 4 :] = 1 - site.strength
            short = gradient * kept[None, :, None]
            return gradient @ weight, torch.einsum("bto,bti->oi", short, x)

    with swapped(module, "forward", lambda x: Linear.apply(x, module.weight)):
        yield
