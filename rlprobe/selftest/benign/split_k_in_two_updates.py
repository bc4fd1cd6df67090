"""Linear layers sum two halves of their width apart, in a step of two mini-batches."""

from collections.abc import Iterator

from rlprobe.faults.patching import linear_in_halves
from rlprobe.selftest import Site, benign


@benign(needs={"updates": 2})
def split_k_in_two_updates(site: Site) -> Iterator[None]:
    with linear_in_halves():
        yield
