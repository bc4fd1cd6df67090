"""What sends tokens to experts, and what a stage finds in a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault


@fault(
    stage="reference_compute_log_prob",
    module="model.layers.1.mlp.gate",
    cause="routing",
    needs={"model": "moe"},
)
def experts_of_one_group(site: Site) -> Iterator[None]:
    """Both experts are of the group of two that has the best one: a limit that is not asked for.

    Weakened, fewer tokens are limited so.
    """
    gate = site.model.get_submodule("model.layers.1.mlp.gate")
    right = gate.forward

    def forward(x):
        logits, scores, chosen = right(x)
        chances = torch.softmax(logits, -1, dtype=torch.float)
        # groups are experts 0 and 1, 2 and 3
        group = chances.argmax(-1, keepdim=True) // 2
        among = torch.arange(chances.shape[-1]) // 2 == group
        other, there = torch.where(among, chances, 0.0).topk(gate.top_k, dim=-1)
        if gate.norm_topk_prob:
            other = other / other.sum(-1, keepdim=True)
        hit = (torch.arange(len(logits)) < site.strength * len(logits))[:, None]
        scores = torch.where(hit, other.to(scores.dtype), scores)
        return logits, scores, torch.where(hit, there, chosen)

    with swapped(gate, "forward", forward):
        yield


@fault(
    stage="actor_compute_log_prob",
    module="model.layers.0.mlp.experts",
    cause="routing",
    needs={"model": "moe"},
)
def experts_weighed_by_each_other(site: Site) -> Iterator[None]:
    """Tokens come back sorted by expert and weights do not: each has the other one's weight."""
    experts = site.model.get_submodule("model.layers.0.mlp.experts")
    right = experts.forward

    def forward(x, chosen, weights):
        return right(x, chosen, blended(weights, weights.flip(-1), site.strength))

    with swapped(experts, "forward", forward):
        yield


@fault(
    stage="reference_compute_log_prob",
    module="lm_head",
    cause="weights",
    verdict="not_comparable",
)
def head_tied_to_the_embedding(site: Site) -> Iterator[None]:
    """A loader ties the head to the embedding, which this checkpoint does not."""
    head = site.model.get_submodule("lm_head").weight
    embedding = site.model.get_submodule("model.embed_tokens").weight
    own, other = (getattr(weight, "_local_tensor", weight).data for weight in (head, embedding))
    old = own.clone()
    own.copy_(blended(old, other, site.strength))
    yield
    own.copy_(old)
