"""Each rank keeps its own gradients."""

from collections.abc import Iterator

import torch.distributed as dist

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause="reduction", needs={"world_size": 2})
def gradients_not_reduced(site: Site) -> Iterator[None]:
    right = dist.reduce_scatter_single

    def kept(output, input, **kwargs):
        own = input.view(site.world_size, -1)[site.rank].clone()
        work = right(output=output, input=input, **kwargs)
        output.add_(site.strength * (own - output))
        return work

    with swapped(dist, "reduce_scatter_single", kept):
        yield
