"""Logits are one per cent too large."""

from collections.abc import Iterator

from rlprobe.faults.patching import output_of
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", module="lm_head", cause="constant_factor")
def logits_scaled(site: Site) -> Iterator[None]:
    with output_of(site.model.get_submodule("lm_head"), lambda x: x * (1 + 0.01 * site.strength)):
        yield
