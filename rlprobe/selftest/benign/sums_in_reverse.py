"""Attention walks its keys backwards."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, benign


@benign(needs={"response_lengths": "varied"})
def sums_in_reverse(site: Site) -> Iterator[None]:
    import sys

    first = next(m for name, m in site.model.named_modules() if name.endswith("self_attn"))
    file = sys.modules[type(first).__module__]
    right = file.eager_attention_forward

    def backwards(module, query, key, value, mask, **kwargs):
        mask = None if mask is None else mask.flip(-1)
        return right(module, query, key.flip(2), value.flip(2), mask, **kwargs)

    with swapped(file, "eager_attention_forward", backwards):
        yield
