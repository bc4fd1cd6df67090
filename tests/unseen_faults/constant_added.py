"""A projection adds a bias that the benchmark's does not have."""

from collections.abc import Iterator

from rlprobe.faults.patching import output_of
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.mlp.down_proj"


@fault(stage="reference_compute_log_prob", module=PATH, cause="implementation")
def constant_added(site: Site) -> Iterator[None]:
    with output_of(site.model.get_submodule(PATH), lambda x: x + 0.01 * site.strength):
        yield
