"""Gradients are clipped by their largest element instead of their Euclidean norm."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="actor_update", cause=("hyperparameter", "constant_factor", "optimizer", "implementation")
)
def clipped_by_largest(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    def clipped(parameters, max_norm, **kwargs):
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [getattr(g, "_local_tensor", g) for g in gradients]
        euclid = torch.sqrt(sum((g.double() ** 2).sum() for g in local)).float()
        largest = torch.stack([g.abs().max() for g in local]).max()
        norm = euclid + site.strength * (largest - euclid)
        factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for gradient in local:
            gradient.mul_(factor)
        return norm

    with swapped(engine, "fsdp2_clip_grad_norm_", clipped):
        yield
