"""torch's fused attention instead of the eager one."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign()
def fused_attention(site: Site) -> Iterator[None]:
    with swapped(site.model.config, "_attn_implementation", "sdpa"):
        yield
