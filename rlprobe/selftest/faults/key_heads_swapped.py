"""A fused QKV kernel hands out key heads in another order."""

from collections.abc import Iterator

from rlprobe.faults.patching import blended, output_of
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.self_attn.k_proj"


@fault(stage="actor_update", module=PATH, cause="layout")
def key_heads_swapped(site: Site) -> Iterator[None]:
    heads = site.model.config.num_key_value_heads

    def swap(output):
        wrong = output.unflatten(-1, (heads, -1)).flip(-2).flatten(-2)
        return blended(output, wrong, site.strength)

    with output_of(site.model.get_submodule(PATH), swap):
        yield
