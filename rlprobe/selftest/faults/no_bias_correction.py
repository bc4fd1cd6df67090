"""An optimizer kernel without Adam's bias correction: first steps are three times too small."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


@fault(stage="actor_update", cause=("optimizer", "constant_factor"), needs={"algorithm": "grpo"})
def no_bias_correction(site: Site) -> Iterator[None]:
    right = site.optimizer.step

    def step(*args, **kwargs):
        parameters = [p for group in site.optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        result = right(*args, **kwargs)
        beta1, beta2 = site.optimizer.param_groups[0]["betas"]
        factor = 1 + site.strength * ((1 - beta1) / (1 - beta2) ** 0.5 - 1)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old + factor * (parameter - old))
        return result

    with swapped(site.optimizer, "step", step):
        yield
