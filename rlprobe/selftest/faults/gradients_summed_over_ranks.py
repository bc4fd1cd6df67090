"""Ranks sum their gradients where the mean is meant (verl#4710: a norm that is N times too big)."""

from collections.abc import Iterator

import torch.distributed as dist

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_update",
    cause=("constant_factor", "reduction"),
    needs={"world_size": 2},
)
def gradients_summed_over_ranks(site: Site) -> Iterator[None]:
    right = dist.reduce_scatter_single

    def summed(output, input, **kwargs):
        work = right(output=output, input=input, **kwargs)
        output.mul_(1 + site.strength * (site.world_size - 1))
        return work

    with swapped(dist, "reduce_scatter_single", summed):
        yield
