"""Values come from the critic of an earlier step: its last update was not loaded."""

from collections.abc import Iterator

import torch

from rlprobe.selftest import Site, fault


@fault(
    stage="critic_compute_values",
    cause=("stale_weights", "weights"),
    verdict="not_comparable",
)
def older_critic(site: Site) -> Iterator[None]:
    generator = torch.Generator().manual_seed(5)
    kept = []
    with torch.no_grad():
        for parameter in site.model.parameters():
            local = getattr(parameter, "_local_tensor", parameter).data
            kept.append((local, local.clone()))
            # what one update of this learning rate moves each weight by
            step = 1e-3 * torch.randn(local.shape, generator=generator).sign()
            local.add_(site.strength * step)
    yield
    for local, right in kept:
        local.copy_(right)
