"""Weight decay is added to the gradient (Adam's L2) instead of taken off the weight (AdamW)."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="critic_update", cause=("optimizer", "implementation"))
def decay_as_gradient(site: Site) -> Iterator[None]:
    optimizer = site.optimizer
    right = optimizer.step

    def step(*args, **kwargs):
        kept = [group["weight_decay"] for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, kept, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter.grad.add_(parameter, alpha=site.strength * decay)
            group["weight_decay"] = (1 - site.strength) * decay
        result = right(*args, **kwargs)
        for group, decay in zip(optimizer.param_groups, kept, strict=True):
            group["weight_decay"] = decay
        return result

    with swapped(optimizer, "step", step):
        yield
