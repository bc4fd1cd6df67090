"""Linear layers sum two halves of their width apart, in a step of two mini-batches."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"updates": 2})
def split_k_in_two_updates(site: Site) -> Iterator[None]:
    right = torch.nn.functional.linear

    def halves(x, weight, bias=None):
        half = x.shape[-1] // 2
        summed = right(x[..., :half], weight[:, :half]) + right(x[..., half:], weight[:, half:])
        return summed if bias is None else summed + bias

    with swapped(torch.nn.functional, "linear", halves):
        yield
