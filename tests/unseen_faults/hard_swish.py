"""The activation is approximated by pieces: x relu6(x + 3) / 6 for silu."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.mlp.act_fn"


@fault(stage="actor_update", module=PATH, cause="implementation")
def hard_swish(site: Site) -> Iterator[None]:
    module = site.model.get_submodule(PATH)
    right = module.forward

    def forward(x):
        return blended(right(x), torch.nn.functional.hardswish(x), site.strength)

    with swapped(module, "forward", forward):
        yield
