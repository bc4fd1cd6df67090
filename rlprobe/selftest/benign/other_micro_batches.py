"""One row a micro-batch instead of two."""

from collections.abc import Iterator

from rlprobe.selftest import Site, benign


@benign()
def other_micro_batches(site: Site) -> Iterator[None]:
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(site.batch, micro_batch_size_per_gpu=1)
    yield
