"""The same in bf16, where two thirds of the elements come out equal and the rest do not."""

from collections.abc import Iterator

from rlprobe.faults.patching import linear_in_halves
from rlprobe.selftest import Site, benign


@benign(needs={"precision": "bf16"})
def split_k_in_bf16(site: Site) -> Iterator[None]:
    with linear_in_halves():
        yield
