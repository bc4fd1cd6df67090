"""The same in bf16, where two thirds of the elements come out equal and the rest do not."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"precision": "bf16"})
def split_k_in_bf16(site: Site) -> Iterator[None]:
    right = torch.nn.functional.linear

    def halves(x, weight, bias=None):
        half = x.shape[-1] // 2
        summed = right(x[..., :half], weight[:, :half]) + right(x[..., half:], weight[:, half:])
        return summed if bias is None else summed + bias

    with swapped(torch.nn.functional, "linear", halves):
        yield
