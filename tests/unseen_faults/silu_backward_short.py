"""The activation's backward leaves out the second term of its derivative."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.mlp.act_fn"


@fault(stage="critic_update", module=PATH, cause="implementation")
def silu_backward_short(site: Site) -> Iterator[None]:
    module = site.model.get_submodule(PATH)

    class Silu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.nn.functional.silu(x)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            gate = torch.sigmoid(x)
            exact = gate * (1 + x * (1 - gate))
            return gradient * blended(exact, gate, site.strength)

    with swapped(module, "forward", Silu.apply):
        yield
