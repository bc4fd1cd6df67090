"""Grouped attention repeats key and value heads as 0101 instead of 0011."""

from collections.abc import Iterator

from rlprobe.faults.patching import attention_of, blended
from rlprobe.selftest import Site, fault


@fault(stage="actor_compute_log_prob", module="model.layers.1.self_attn", cause="layout")
def kv_heads_tiled(site: Site) -> Iterator[None]:
    def tiled(right, module, query, key, value, mask, **kwargs):
        grouped, weights = right(module, query, key, value, mask, **kwargs)
        # query heads in the order that pairs head i with key head i modulo their number
        groups = module.num_key_value_groups
        heads = query.shape[1]
        order = [i for k in range(heads // groups) for i in range(k, heads, heads // groups)]
        output, seen = right(module, query[:, order], key, value, mask, **kwargs)
        back = [order.index(i) for i in range(heads)]
        own = blended(weights, seen[:, back], site.strength)
        return blended(grouped, output[:, :, back], site.strength), own

    with attention_of(site.model.get_submodule("model.layers.1.self_attn"), tiled):
        yield
