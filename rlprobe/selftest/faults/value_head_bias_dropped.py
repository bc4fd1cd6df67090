"""The value head is run without its bias (vllm#51594 dropped a delta in the same way)."""

from collections.abc import Iterator

from rlprobe.faults.patching import output_of
from rlprobe.selftest import Site, fault


@fault(
    stage="critic_compute_values",
    module="score",
    cause="implementation",
    needs={"critic_head_bias": True},
)
def value_head_bias_dropped(site: Site) -> Iterator[None]:
    head = site.model.get_submodule("score")
    with output_of(head, lambda x: x - site.strength * head.bias.detach()):
        yield
