"""A linear layer passes on five per cent too much gradient."""

from collections.abc import Iterator

from rlprobe.faults.patching import gradient_through
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.mlp.down_proj"


@fault(stage="actor_update", module=PATH, cause="constant_factor")
def input_gradient_scaled(site: Site) -> Iterator[None]:
    scale = 1 + 0.05 * site.strength
    with gradient_through(site.model.get_submodule(PATH), lambda gradient: gradient * scale):
        yield
