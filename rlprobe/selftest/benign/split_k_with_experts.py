"""Linear layers sum two halves of their width apart; experts run alike on both sides."""

from collections.abc import Iterator

from rlprobe.faults.patching import linear_in_halves
from rlprobe.selftest import Site, benign


@benign(needs={"model": "moe", "algorithm": "grpo"})
def split_k_with_experts(site: Site) -> Iterator[None]:
    with linear_in_halves():
        yield
