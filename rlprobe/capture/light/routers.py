"""What a router hands out: which experts each token has, and by what weights.

Routers say it in two ways. transformers' hand out numbers of experts and weights, both [tokens,
experts of each], and scores of all experts beside them; Megatron's a weight for every expert,
[tokens, experts], zero for most, and a map of truth values. Here both are one: a weight for every
expert, so that two routers are compared by what follows from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
#: A place of a token that no expert has (dropped tokens).
NONE = -1


@dataclass(frozen=True)
class Choice:
    """A router's outputs."""

    #: Numbers of the chosen experts, [tokens, experts of each], or truth values, [tokens, experts].
    chosen: Tensor
    #: The weights in the autograd graph, of the same shape.
    weights: Tensor
    #: How many experts there are.
    experts: int

    @property
    def is_map(self) -> bool:
        return self.chosen.dtype == torch.bool

    def numbers(self, chosen: Tensor) -> Tensor:
        """Numbers of experts, ascending, [tokens, experts of each]; NONE for none.

        Args:
            chosen: rows of ``chosen``.
        """
        if not self.is_map:
            return chosen.sort(dim=-1).values
        most = max(1, int(chosen.sum(dim=-1).max())) if chosen.numel() else 1
        found = chosen.to(torch.uint8).topk(most, dim=-1)
        numbers = torch.where(found.values.bool(), found.indices, self.experts)
        numbers = numbers.sort(dim=-1).values
        return torch.where(numbers < self.experts, numbers, NONE)

    def dense(self, values: Tensor) -> Tensor:
        """Weights, or a gradient at them, for every expert: [tokens, experts].

        Args:
            values: of the shape of ``weights``.
        """
        values = values.detach()
        if self.is_map:
            return values
        whole = values.new_zeros(values.shape[0], self.experts)
        return whole.scatter(1, self.chosen, values)


_ROUTER = re.compile(r"(^|\.)(gate|router|mlp\.gate|block_sparse_moe\.gate)$")


def may_route(path: str) -> bool:
    """Whether a module's path says that it may be a router."""
    return _ROUTER.search(path) is not None


def choice(outputs: Iterable[Tensor]) -> Choice | None:
    """The choice that a module hands out; None where it is no router."""
    found = [tensor for tensor in outputs if tensor.dim() == 2]
    scores = [tensor for tensor in found if tensor.is_floating_point()]
    if len(found) < 2 or len(scores) == len(found):
        return None
    for chosen in found:
        weights = next((own for own in scores if own.shape == chosen.shape), None)
        if weights is None:
            continue
        if chosen.dtype == torch.bool:
            return Choice(chosen, weights, int(chosen.shape[1]))
        # scores of all experts stand beside the weights of the chosen
        every = max(int(own.shape[1]) for own in scores if own.shape[0] == chosen.shape[0])
        if chosen.dtype in _NUMBERS and every > chosen.shape[1]:
            return Choice(chosen.to(torch.int64), weights, every)
    return None
