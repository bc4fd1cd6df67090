"""Two ranks instead of one: other samples on each, shards of every parameter, sums over gloo."""

from collections.abc import Iterator

from rlprobe.selftest import Site, benign


@benign(needs={"target_world_size": 2})
def spread_over_two_ranks(_: Site) -> Iterator[None]:
    yield
