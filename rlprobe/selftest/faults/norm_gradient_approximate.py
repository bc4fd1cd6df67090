"""A norm's backward treats its own scale as a constant."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.post_attention_layernorm"


@fault(stage="critic_update", module=PATH, cause="implementation")
def norm_gradient_approximate(site: Site) -> Iterator[None]:
    norm = site.model.get_submodule(PATH)
    right = norm.forward

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            with torch.enable_grad():
                ctx.x, ctx.weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
                ctx.y = right(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, gradient):
            (exact,) = torch.autograd.grad(ctx.y, ctx.x, gradient, retain_graph=True)
            scale = torch.rsqrt(ctx.x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            approximate = gradient * ctx.weight * scale
            of_weight = (gradient * ctx.x * scale).sum(dim=(0, 1))
            return blended(exact, approximate, site.strength), of_weight

    def forward(x):
        return Norm.apply(x, norm.weight)

    with swapped(norm, "forward", forward):
        yield
