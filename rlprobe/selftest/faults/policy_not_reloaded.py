"""The second step's log-probs are still those of the first step's policy."""

from collections.abc import Iterator

import torch

from rlprobe.selftest import Site, fault

_first: list[torch.Tensor] = []


@fault(
    stage="actor_compute_log_prob",
    cause=("stale_weights", "weights"),
    verdict="not_comparable",
    needs={"steps": 2},
)
def policy_not_reloaded(site: Site) -> Iterator[None]:
    weights = [getattr(p, "_local_tensor", p).data for p in site.model.parameters()]
    if site.step == 0:
        _first[:] = [w.clone() for w in weights]
        yield
        return
    current = [w.clone() for w in weights]
    for weight, first in zip(weights, _first, strict=True):
        weight.copy_(first)
    yield
    for weight, right in zip(weights, current, strict=True):
        weight.copy_(right)
