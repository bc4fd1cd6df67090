"""Which tokens a suspect's outputs depend on: one token of its input is another, and it runs again.

An attention's mask is no argument that all implementations have, but who attends to whom shows in
what changes. Nothing is left behind, as with any second run (:mod:`again`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from rlprobe.capture.trace.again import Alone, Before, put_back
from rlprobe.capture.trace.operators import tensors
from rlprobe.capture.trace.values import unpacked

#: Tokens that are changed, each in a run of its own, evenly over the micro-batch.
_MOST = 96
#: Elements of output that all these runs may make together.
_ELEMENTS = 1 << 28


def measured(module: nn.Module, before: Before, output: Any) -> Tensor | None:
    """By how much each token's output changes where one token's input does.

    Args:
        module: its hooks are not to run: the caller sees to that.
        before: the call, which repeats itself.
        output: what it returned.

    Returns:
        [changed tokens, 1 + tokens] in fp32: the number of the changed token (in row-major order
        of the leading dimensions), and the relative L2 change of every token's output; None where
        input and output are not of the same tokens, or that is too much to run.
    """
    given, form = tree_flatten((before.args, before.kwargs))
    first = next(iter(tensors(output)), None)
    if first is None:
        return None
    shape = unpacked(first).shape
    place = next((i for i, v in enumerate(given) if _is_of_tokens(v, shape)), None)
    count = math.prod(shape[:-1])
    if place is None or count < 2 or first.numel() * min(count, _MOST) > _ELEMENTS:
        return None
    chosen = torch.linspace(0, count - 1, min(count, _MOST), dtype=torch.float64)
    rows = []

    def made(values: list[Any]) -> Tensor:
        put_back(before.state, before.device)
        copies = [v.detach().clone() if isinstance(v, Tensor) else v for v in values]
        args, kwargs = tree_unflatten(copies, form)
        found = next(tensors(module.forward(*args, **kwargs)))
        return unpacked(found).detach().reshape(count, -1).float()

    with torch.no_grad(), Alone():
        base = made(given)
        sizes = base.norm(dim=-1).clamp_min(1e-30)
        for token in chosen.round().long().unique().tolist():
            other = given[place].detach().clone()
            flat = other.reshape(count, -1)
            flat[token] = 1 - flat[token].roll(1)
            values = [*given[:place], flat.reshape(other.shape), *given[place + 1 :]]
            change = (made(values) - base).norm(dim=-1) / sizes
            rows.append(torch.cat([change.new_tensor([float(token)]), change]).cpu())
    return torch.stack(rows)


def _is_of_tokens(value: Any, shape: torch.Size) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and value.is_floating_point()
        and value.dim() == len(shape) > 1
        and value.shape[:-1] == shape[:-1]
    )
