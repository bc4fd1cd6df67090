"""Two threads: sums are split otherwise."""

from collections.abc import Iterator

import torch

from rlprobe.selftest import Site, benign


@benign()
def two_threads(site: Site) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
