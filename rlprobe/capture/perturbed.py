"""Weights disturbed in the last bit before training: how far chaos alone carries a run.

Training amplifies any difference, so that two correct devices' curves part after some steps. What
they may part by is seen in further replays on one device whose initial weights are moved by one
unit in the last place of the precision they compute in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

#: Relative distance of neighbouring numbers, at most, in each compute precision.
LAST_BIT: dict[str, float] = {
    "fp64": 2.0**-52,
    "fp32": 2.0**-23,
    "fp16": 2.0**-10,
    "bf16": 2.0**-7,
}


def disturb(chunks: Any, number: int, precision: str, optimizer: Any = None) -> int:
    """Move every floating-point parameter by one unit in the last place, up or down by chance.

    The signs follow from ``number``, the parameter's name and its shape on this rank: replicas of a
    parameter stay equal, and the actor and the reference that begin with the same weights do too.

    Args:
        chunks: a module, or the list of its chunks; parameters may be DTensors.
        number: of the perturbed run, from 1.
        precision: that the model computes in, of :data:`LAST_BIT`; what is kept in a wider format
            is moved by as much, as less would not reach a single result.
        optimizer: one that keeps copies of the weights takes them anew.

    Returns:
        How many elements moved on this rank; zeros do not.
    """
    import torch

    moved = 0
    with torch.no_grad():
        for name, parameter in _parameters(chunks):
            local = getattr(parameter, "_local_tensor", parameter)
            if not local.is_floating_point() or not local.numel():
                continue
            seed = hashlib.sha256(f"{number} {name} {tuple(local.shape)}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed[:6], "little"))
            signs = torch.randint(0, 2, tuple(local.shape), generator=generator) * 2 - 1
            step = signs.to(local.device, local.dtype) * LAST_BIT[precision]
            new = local + local * step
            moved += int(torch.count_nonzero(new != local))
            local.copy_(new)
    if moved and hasattr(optimizer, "reload_model_params"):  # Megatron's, of half precision
        optimizer.reload_model_params()
    return moved


def _parameters(chunks: Any) -> Iterable[tuple[str, Any]]:
    for chunk in chunks if isinstance(chunks, (list, tuple)) else [chunks]:
        yield from chunk.named_parameters()
