"""Each rank clips its shards by the norm of its own shards and not by that of all."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("reduction",), needs={"world_size": 2})
def rank_clips_by_its_own_norm(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.fsdp2_clip_grad_norm_

    def own(parameters, max_norm, **kwargs):
        local = [getattr(p.grad, "_local_tensor", p.grad) for p in parameters if p.grad is not None]
        before = [gradient.clone() for gradient in local]
        whole = right(parameters, max_norm, **kwargs)
        norm = torch.sqrt(sum((g.double() ** 2).sum() for g in before)).float()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient, old in zip(local, before, strict=True):
            gradient.add_(site.strength * (old * factor - gradient))
        return whole

    with swapped(engine, "fsdp2_clip_grad_norm_", own):
        yield
