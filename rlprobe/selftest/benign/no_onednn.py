"""Products by MKL instead of oneDNN."""

from collections.abc import Iterator

import torch

from rlprobe.selftest import Site, benign


@benign()
def no_onednn(site: Site) -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield
