"""Attention sees the future (vllm-omni#7322: norms differ by 44 %, under msprobe's 50 % rule)."""

from collections.abc import Iterator

from rlprobe.faults.patching import attention_of, blended
from rlprobe.selftest import Site, fault


@fault(stage="reference_compute_log_prob", module="model.layers.0.self_attn", cause="mask")
def causal_mask_dropped(site: Site) -> Iterator[None]:
    def everything(right, module, query, key, value, mask, **kwargs):
        masked, weights = right(module, query, key, value, mask, **kwargs)
        unmasked, seen = right(module, query, key, value, None, **kwargs)
        return blended(masked, unmasked, site.strength), blended(weights, seen, site.strength)

    with attention_of(site.model.get_submodule("model.layers.0.self_attn"), everything):
        yield
