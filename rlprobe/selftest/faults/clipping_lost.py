"""Gradients are not clipped (their norm is reported all the same)."""

from collections.abc import Iterator

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("optimizer", "hyperparameter", "constant_factor"))
def clipping_lost(site: Site) -> Iterator[None]:
    import verl.workers.engine.fsdp.transformer_impl as engine

    right = engine.fsdp2_clip_grad_norm_

    def unclipped(parameters, max_norm, **kwargs):
        return right(parameters, max_norm * (1 + 1e6 * site.strength), **kwargs)

    with swapped(engine, "fsdp2_clip_grad_norm_", unclipped):
        yield
