"""Another activation function of nearly the same shape."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.mlp.act_fn"


@fault(stage="critic_compute_values", module=PATH, cause="implementation")
def gelu_for_silu(site: Site) -> Iterator[None]:
    module = site.model.get_submodule(PATH)
    right = module.forward

    def forward(x):
        wrong = torch.nn.functional.gelu(x, approximate="tanh")
        return blended(right(x), wrong, site.strength)

    with swapped(module, "forward", forward):
        yield
