"""Linear layers sum two halves of their width apart, as tensor parallelism does."""

from collections.abc import Iterator

from rlprobe.faults.patching import linear_in_halves
from rlprobe.selftest import Site, benign


@benign()
def split_k(site: Site) -> Iterator[None]:
    with linear_in_halves():
        yield
