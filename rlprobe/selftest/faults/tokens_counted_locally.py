"""Each rank divides its loss by its own number of tokens and not by all ranks'."""

from collections.abc import Iterator

import torch.distributed as dist

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_update",
    cause=("reduction", "loss", "constant_factor"),
    needs={"world_size": 2, "response_lengths": "varied"},
)
def tokens_counted_locally(site: Site) -> Iterator[None]:
    right = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        own = tensor.clone()
        work = right(tensor, *args, **kwargs)
        if not tensor.is_floating_point() and tensor.numel() == 1:
            tensor.copy_(own * site.world_size)
        return work

    with swapped(dist, "all_reduce", counted):
        yield
