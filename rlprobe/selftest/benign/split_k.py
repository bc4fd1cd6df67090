"""Linear layers sum two halves of their width apart, as tensor parallelism does."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign()
def split_k(site: Site) -> Iterator[None]:
    right = torch.nn.functional.linear

    def halves(x, weight, bias=None):
        half = x.shape[-1] // 2
        summed = right(x[..., :half], weight[:, :half]) + right(x[..., half:], weight[:, half:])
        return summed if bias is None else summed + bias

    with swapped(torch.nn.functional, "linear", halves):
        yield
