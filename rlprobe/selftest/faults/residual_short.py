"""A fused block adds nine tenths of the residual instead of all of it."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1"


@fault(stage="reference_compute_log_prob", module=PATH, cause="implementation")
def residual_short(site: Site) -> Iterator[None]:
    layer = site.model.get_submodule(PATH)
    right = layer.forward

    def forward(hidden_states, *args, **kwargs):
        return right(hidden_states, *args, **kwargs) - 0.1 * site.strength * hidden_states

    with swapped(layer, "forward", forward):
        yield
