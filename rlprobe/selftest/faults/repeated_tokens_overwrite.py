"""The embedding's gradient keeps one of a token's occurrences instead of their sum."""

from collections.abc import Iterator

import torch

from rlprobe.faults.patching import swapped
from rlprobe.selftest import Site, fault

PATH = "model.embed_tokens"


@fault(stage="critic_update", module=PATH, cause="implementation")
def repeated_tokens_overwrite(site: Site) -> Iterator[None]:
    embedding = site.model.get_submodule(PATH)

    class Embedding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, ids, weight):
            ctx.save_for_backward(ids)
            ctx.shape = weight.shape
            return torch.nn.functional.embedding(ids, weight)

        @staticmethod
        def backward(ctx, gradient):
            (ids,) = ctx.saved_tensors
            rows, flat = gradient.flatten(0, 1), ids.flatten()
            summed = torch.zeros(ctx.shape).index_add_(0, flat, rows)
            last = {int(token): place for place, token in enumerate(flat)}
            kept = torch.zeros(ctx.shape)
            for token, place in last.items():
                kept[token] = rows[place]
            return None, summed + site.strength * (kept - summed)

    with swapped(embedding, "forward", lambda ids: Embedding.apply(ids, embedding.weight)):
        yield
