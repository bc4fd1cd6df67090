"""Weight conversion mixed up the heads of a projection (vime#274)."""

from collections.abc import Iterator

from rlprobe.selftest import Site, fault

PATH = "model.layers.1.self_attn.q_proj"


@fault(
    stage="actor_compute_log_prob",
    module=PATH,
    cause=("weights", "layout"),
    verdict="not_comparable",
)
def query_rows_permuted(site: Site) -> Iterator[None]:
    weight = site.model.get_submodule(PATH).weight
    local = getattr(weight, "_local_tensor", weight).data
    right = local.clone()
    heads = right.unflatten(0, (site.model.config.num_attention_heads, -1))
    local.copy_(heads.flip(0).flatten(0, 1))
    yield
    local.copy_(right)
