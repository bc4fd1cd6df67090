"""The mask of the whole model hides the first token (taken for padding) from all others."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault


# made in the model's own forward; the first module to use it is the first attention
@fault(stage="actor_update", module="model.layers.0.self_attn", cause="mask")
def first_token_hidden(site: Site) -> Iterator[None]:
    import transformers.models.qwen2.modeling_qwen2 as model

    right = model.create_causal_mask

    def hiding(*args, **kwargs):
        mask = right(*args, **kwargs).clone()
        # at strength s the first key's scores are lowered by log(1 - s)
        hidden = 1 - min(site.strength, 1 - 1e-30)
        lowered = float(torch.log(torch.tensor(hidden, dtype=torch.float64)))
        if site.strength == 1:
            lowered = torch.finfo(mask.dtype).min
        mask[..., 1:, 0] = mask[..., 1:, 0] + lowered
        return mask

    with swapped(model, "create_causal_mask", hiding):
        yield
