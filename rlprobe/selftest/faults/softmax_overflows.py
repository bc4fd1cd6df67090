"""A softmax that does not subtract its maximum: exp overflows and Inf / Inf is NaN."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.self_attn"


@fault(stage="critic_compute_values", module=PATH, cause="nonfinite")
def softmax_overflows(site: Site) -> Iterator[None]:
    def naive(x, dim, dtype=None, **kwargs):
        # scores of a long context reach this height; the tiny model's do not
        powers = torch.exp(x.to(dtype) + 80.0)
        return powers / powers.sum(dim, keepdim=True)

    def overflowing(right, module, *args, **kwargs):
        with swapped(torch.nn.functional, "softmax", naive):
            return right(module, *args, **kwargs)

    with attention_of(site.model.get_submodule(PATH), overflowing):
        yield
