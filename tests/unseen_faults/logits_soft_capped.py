"""Logits pass through a soft cap (Gemma's) that this model does not have."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, output_of
from rlprobe.selftest import Site, fault


@fault(stage="reference_compute_log_prob", module="lm_head", cause="implementation")
def logits_soft_capped(site: Site) -> Iterator[None]:
    def capped(x):
        return blended(x, 2.0 * torch.tanh(x / 2.0), site.strength)

    with output_of(site.model.get_submodule("lm_head"), capped):
        yield
