"""One projection multiplies with a weight that was rounded to int8, a scale for each row."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.mlp.down_proj"


@fault(stage="actor_compute_log_prob", module=PATH, cause=("rounding_order", "implementation"))
def weight_in_int8(site: Site) -> Iterator[None]:
    module = site.model.get_submodule(PATH)

    def forward(x):
        weight = module.weight
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        coarse = (weight / scale).round().clamp(-127, 127) * scale
        return torch.nn.functional.linear(x, blended(weight, coarse, site.strength))

    with swapped(module, "forward", forward):
        yield
