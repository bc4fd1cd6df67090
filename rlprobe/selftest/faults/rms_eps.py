"""A norm with another epsilon."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.input_layernorm"


@fault(stage="actor_compute_log_prob", module=PATH, cause="hyperparameter")
def rms_eps(site: Site) -> Iterator[None]:
    layer = site.model.get_submodule(PATH)
    epsilon = layer.variance_epsilon + site.strength * 1e-2
    with swapped(layer, "variance_epsilon", epsilon):
        yield
