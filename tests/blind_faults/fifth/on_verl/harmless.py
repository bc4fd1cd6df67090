"""What reads aligned."""

import torch
import torch.nn.functional as F
from _planting import kernel

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"model": "llama"})
def b_silu_by_expm1(site: Site):
    def silu(x, inplace=False):
        return x / (2 + torch.expm1(-x))

    with swapped(F, "silu", silu):
        yield


@benign()
def b_mm_in_blocks_of_k(site: Site):
    def wrong(right, a, b):
        k = a.shape[1]
        if k < 32:
            return right(a, b)
        y = right(a[:, :16], b[:16])
        for i in range(16, k, 16):
            y = y + right(a[:, i : i + 16], b[i : i + 16])
        return y

    with kernel(("mm", wrong)):
        yield


@benign(needs={"model": "moe"})
def b_softmax_in_fp64(site: Site):
    def wrong(right, x, dim, half):
        return right(x.double(), dim, half).to(x.dtype)

    with kernel(("_softmax", wrong)):
        yield


@benign(needs={"model": "llama"})
def b_adam_root_by_power(site: Site):
    with kernel(("sqrt", lambda right, x: x.pow(0.5))):
        yield
