"""A table of rotary angles that ends at position 24: later tokens reuse its last row."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_compute_values", module="model.rotary_emb", cause="position")
def rope_cache_too_short(site: Site) -> Iterator[None]:
    rotary = site.model.get_submodule("model.rotary_emb")
    right = rotary.forward

    def forward(x, position_ids):
        given = position_ids.float()
        return right(x, given + site.strength * (given.clamp(max=24) - given))

    with swapped(rotary, "forward", forward):
        yield
