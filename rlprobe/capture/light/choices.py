"""Which experts a router chose for each token, as numbers that stand beside the token's sketches.

Two programs that agree in everything may send a token to other experts, at a near tie or by a
fault. A choice is written as the sum of its experts' codes, 17 whole numbers each, so that two
choices are equal where their codes are. Whether the router says its choice (ids, or a map of truth
values) or leaves choosing to what comes after it (its scores alone, of which the largest are taken)
makes no difference to that. A router that adds a bias to its scores, or chooses groups of experts
first, has to say its choice itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlprobe.capture.light.token_sketches import K
from rlprobe.capture.names import unwrap
from rlprobe.sketch import CHOSEN, murmur3_finaliser

_ROUTERS = ("gate", "router")
_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "num_moe_experts")
_EACH = ("num_experts_per_tok", "moe_router_topk", "moe_topk")
_BIASED = ("e_score_correction_bias", "expert_bias", "correction_bias")
_RANGE = 1024


@dataclass(frozen=True)
class Routing:
    """How many experts a model's blocks have, and how many a token is sent to."""

    experts: int
    each: int
    #: The largest scores are the choice.
    by_score: bool

    @classmethod
    def of(cls, models: list[nn.Module]) -> Routing | None:
        """Of a model by its configuration; None where it has no experts."""
        for model in models:
            root = unwrap(model)[1]
            config = getattr(root, "config", None)
            experts, each = (_first(config, names) for names in (_COUNT, _EACH))
            if experts and each:
                return cls(experts, each, (getattr(config, "n_group", None) or 1) == 1)
        return None

    def chosen(self, path: str, module: nn.Module, output: Any) -> Tensor | None:
        """Codes of the experts that a router chose; None where it is none, or does not say.

        Args:
            path: the module's.
            module: any module.
            output: what it gave.

        Returns:
            Shape ``[tokens, 17]``, fp32.
        """
        if path.rpartition(".")[2] not in _ROUTERS:
            return None
        given = list(_tensors(output))
        for tensor in given:
            if tensor.dtype == torch.bool and tensor.shape[-1] == self.experts:
                chosen = tensor.detach().reshape(-1, self.experts).float().topk(self.each, dim=-1)
                # a token may have been dropped by an expert that is full
                return self._codes(chosen.indices, chosen.values)
        for tensor in given:
            whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
            if whole and tensor.dim() > 1 and tensor.shape[-1] == self.each:
                return self._codes(tensor)
        if not self.by_score or any(getattr(module, name, None) is not None for name in _BIASED):
            return None
        for tensor in given:
            if tensor.is_floating_point() and tensor.shape[-1] == self.experts:
                return self._codes(tensor.topk(self.each, dim=-1).indices)
        return None

    def _codes(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sums of the codes of each token's experts: not as a product, which autocast rounds."""
        flat = ids.detach().reshape(-1, self.each).long()
        codes = _table(self.experts, flat.device)[flat]
        return (codes if weights is None else codes * weights[..., None]).sum(1)


def record(call: str) -> str:
    """The name of a router's choice beside its call's records."""
    return f"{call}{CHOSEN}"


def _tensors(output: Any) -> Iterator[Tensor]:
    for value in output if isinstance(output, (list, tuple)) else (output,):
        if isinstance(value, Tensor) and value.dim() > 1:
            yield value


def _table(experts: int, device: torch.device) -> Tensor:
    numbers = murmur3_finaliser(np.arange(experts * K, dtype=np.uint32)) % np.uint32(_RANGE)
    values = numbers.astype(np.float32).reshape(experts, K) - _RANGE // 2
    return torch.from_numpy(values).to(device)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
