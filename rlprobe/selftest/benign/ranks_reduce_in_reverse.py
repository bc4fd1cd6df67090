"""Two ranks add their gradients in the other order, in a product that is split as well."""

from collections.abc import Iterator

import torch.distributed as dist

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"world_size": 2})
def ranks_reduce_in_reverse(site: Site) -> Iterator[None]:
    right = dist.reduce_scatter_single

    def halves(output, input, **kwargs):
        first = input * 0.3
        rest = input - first
        other = output.clone()
        right(output=other, input=first, **kwargs)
        work = right(output=output, input=rest, **kwargs)
        output.add_(other)
        return work

    with swapped(dist, "reduce_scatter_single", halves):
        yield
