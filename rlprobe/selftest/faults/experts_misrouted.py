"""Near ties between experts fall the other way: router scores are perturbed before the choice."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.mlp.gate"


@fault(stage="actor_compute_log_prob", module=PATH, cause="routing", needs={"model": "moe"})
def experts_misrouted(site: Site) -> Iterator[None]:
    router = site.model.get_submodule(PATH)
    right = router.forward

    def forward(hidden_states):
        logits, _, _ = right(hidden_states)
        noise = torch.cos(37.0 * logits)
        probabilities = torch.softmax(logits + 0.3 * site.strength * noise, dim=-1)
        scores, indices = torch.topk(probabilities, router.top_k, dim=-1)
        return logits, scores, indices

    with swapped(router, "forward", forward):
        yield
