"""The vocabulary is padded to a multiple of 64 and the padding's logits of 0 are counted."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="reference_compute_log_prob", cause=("sampling_semantics", "implementation"))
def vocabulary_padded(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.logprobs_from_logits

    def padded(logits, labels, **kwargs):
        more = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % 64))
        kept = right(logits, labels, **kwargs)
        return blended(kept, right(more, labels, **kwargs), site.strength)

    with swapped(engine, "logprobs_from_logits", padded):
        yield
