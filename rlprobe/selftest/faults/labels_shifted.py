"""Log-probs are taken of the next but one token (VeOmni#917: labels shifted twice)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", cause="label_or_mask_shift")
def labels_shifted(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.logprobs_from_logits

    def shifted(logits, labels, **kwargs):
        wrong = right(logits, torch.roll(labels, -1), **kwargs)
        return blended(right(logits, labels, **kwargs), wrong, site.strength)

    with swapped(engine, "logprobs_from_logits", shifted):
        yield
