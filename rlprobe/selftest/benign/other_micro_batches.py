"""One row a micro-batch instead of two."""

from collections.abc import Iterator

from rlprobe.selftest import Site, benign


@benign(needs={"target_micro_batch": 1})
def other_micro_batches(site: Site) -> Iterator[None]:
    yield
