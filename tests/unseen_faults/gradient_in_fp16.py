"""One projection's backward receives its gradient in fp16."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.self_attn.v_proj"


@fault(stage="critic_update", module=PATH, cause="rounding_order")
def gradient_in_fp16(site: Site) -> Iterator[None]:
    module = site.model.get_submodule(PATH)

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return torch.nn.functional.linear(x, weight, bias)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            coarse = gradient.to(torch.float16).to(gradient.dtype)
            gradient = blended(gradient, coarse, site.strength)
            flat, given = gradient.flatten(0, -2), x.flatten(0, -2)
            return gradient @ weight, flat.t() @ given, flat.sum(0)

    with swapped(module, "forward", lambda x: Linear.apply(x, module.weight, module.bias)):
        yield
