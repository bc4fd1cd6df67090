"""The chosen experts' weights are made to sum to one, which this model does not do."""

from collections.abc import Iterator

from rlprobe.faults.patching import blended, swapped
from rlprobe.selftest import Site, fault

PATH = "model.layers.1.mlp.gate"


@fault(
    stage="reference_compute_log_prob",
    module=PATH,
    cause=("routing", "implementation"),
    needs={"model": "moe"},
)
def router_renormalised(site: Site) -> Iterator[None]:
    router = site.model.get_submodule(PATH)
    right = router.forward

    def forward(hidden_states):
        logits, scores, indices = right(hidden_states)
        whole = scores / scores.sum(dim=-1, keepdim=True)
        return logits, blended(scores, whole, site.strength), indices

    with swapped(router, "forward", forward):
        yield
