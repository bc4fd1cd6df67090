"""torch's fused attention where adapters are trained on an actor that is its own reference."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"algorithm": "grpo", "lora": True})
def fused_attention_with_adapters(site: Site) -> Iterator[None]:
    with swapped(site.model.config, "_attn_implementation", "sdpa"):
        yield
