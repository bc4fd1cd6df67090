"""Attention drops a tenth of its probabilities although the configuration says none."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import attention_of
from rlprobe.selftest import Site, fault

PATH = "model.layers.0.self_attn"


@fault(stage="actor_compute_log_prob", module=PATH, cause="nondeterministic")
def attention_dropout_left_on(site: Site) -> Iterator[None]:
    def dropping(right, module, query, key, value, mask, **kwargs):
        _, weights = right(module, query, key, value, mask, **kwargs)
        kept = torch.nn.functional.dropout(weights, p=0.1 * site.strength, training=True)
        groups = module.num_key_value_groups
        mixed = torch.matmul(kept, value.repeat_interleave(groups, dim=1))
        return mixed.transpose(1, 2).contiguous(), kept

    with attention_of(site.model.get_submodule(PATH), dropping):
        yield
