"""Adapters (LoRA) that an inference engine has apart from its weights, by training's names.

vLLM wraps a layer that may have adapters; what its kernels read is in two stacks of the wrapper,
``[adapters, 1, rows, columns]`` for each part of a fused layer, padded with zeros up to the largest
rank, and with the factor alpha / r multiplied into B. Here each is what training has of it: the
active adapter's, without padding and factor, and where in the whole a tensor-parallel rank's lies.
Layers are known by what they have; no engine is imported.

Left out is what cannot be told apart: several active adapters, adapters that tensor parallelism
divides by their rank (``fully_sharded_loras``), and those of experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from rlprobe.capture.names import parameter_name, unwrap
from rlprobe.capture.parameters import Held
from rlprobe.logical import fused

_A, _B, _BASE = "lora_a_stacked", "lora_b_stacked", "base_layer"
#: Of a base layer that is divided by its inputs, and not by its outputs.
_BY_INPUT = "RowParallelLinear"
#: What PEFT calls the adapter that verl trains.
_NAME = "default"


def held(models: list[nn.Module]) -> Iterator[tuple[Held, Tensor]]:
    """The parts of an engine's adapters that this rank has; nothing of any other model.

    Args:
        models: the model, or its parts.
    """
    for _, root in (unwrap(model) for model in models):
        manager = getattr(root, "lora_manager", None)
        slots = getattr(manager, "lora_index_to_id", None)
        active = [slot for slot, id in enumerate(slots or ()) if id is not None]
        if slots is None or len(active) > 1:
            continue
        scales = _scales(manager, active)
        for path, module in root.named_modules():
            if _is_adapted(module):
                slot, factors = active[0] if active else 0, [1.0] * len(getattr(module, _A))
                if scales is not None:
                    factors = scales.get(path, [])
                yield from _layer(path, module, slot, factors)


def _is_adapted(module: nn.Module) -> bool:
    stacks = getattr(module, _A, None), getattr(module, _B, None)
    base = getattr(module, _BASE, None)
    config = getattr(module, "lora_config", None)
    return (
        all(isinstance(stack, tuple) and stack and stack[0].dim() == 4 for stack in stacks)
        and isinstance(base, nn.Module)
        and not getattr(config, "fully_sharded_loras", False)
    )


def _scales(manager: Any, active: Sequence[int]) -> Mapping[str, list[float]] | None:
    """alpha / r of each part of each layer of the active adapter; None where there is none."""
    if not active:
        return None
    known = getattr(manager, "_registered_adapters", {})
    adapter = known.get(manager.lora_index_to_id[active[0]])
    found = {}
    for path, layer in getattr(adapter, "loras", {}).items():
        alphas = getattr(layer, "lora_alphas", None) or [getattr(layer, "lora_alpha", None)]
        rank = getattr(layer, "rank", None)
        if rank and all(alphas):
            found[path] = [float(alpha) / rank for alpha in alphas]
    return found


def _layer(
    path: str, module: Any, slot: int, factors: list[float]
) -> Iterator[tuple[Held, Tensor]]:
    name, base = parameter_name(path), getattr(module, _BASE)
    rank, size = int(getattr(base, "tp_rank", 0)), int(getattr(base, "tp_size", 1))
    parts = len(getattr(module, _A))
    above, _, leaf = name.rpartition(".")
    names = [name]
    if parts > 1:
        names = [f"{above}.{part}" for part in fused.PARTS.get(leaf, ())]
    elif leaf in fused.PARTS and size > 1:
        return  # one adapter of several parts: a rank has rows of each
    if len(names) != parts:
        return
    by_input = _BY_INPUT in {cls.__name__ for cls in type(base).__mro__}
    ids = getattr(module, "output_ids", (rank,) * parts)
    for number, part in enumerate(names):
        a, b = (getattr(module, stack)[number][slot, 0] for stack in (_A, _B))
        # rows of a rank that training has none of are zero
        used = a.ne(0).any(dim=1).nonzero()
        rows = int(used[-1]) + 1 if len(used) else a.shape[0]
        a, b = a[:rows], b[:, :rows]
        whole = _outputs(base, part, b.shape[0], 1 if by_input else size)
        yield _piece(f"{part}.lora_A.{_NAME}.weight", a, 1, rank, size if by_input else 1)
        if number < len(factors):  # unknown: B is not comparable
            item, own = _piece(
                f"{part}.lora_B.{_NAME}.weight", b / factors[number],
                0, int(ids[number]), whole // b.shape[0],
            )  # fmt: skip
            # only a power of two is multiplied in and taken out again without rounding
            yield dataclasses.replace(item, exact=math.frexp(factors[number])[0] == 0.5), own


def _outputs(base: Any, part: str, held: int, size: int) -> int:
    """How many outputs a part of a layer has in the whole, of which a rank has ``held``."""
    heads = getattr(base, "total_num_kv_heads", None)
    if size > 1 and heads is not None and part.rpartition(".")[2] in ("k_proj", "v_proj"):
        return int(heads) * int(base.head_size)
    return held * size


def _piece(
    name: str, tensor: Tensor, dimension: int, place: int, pieces: int
) -> tuple[Held, Tensor]:
    tensor = tensor.contiguous()
    if pieces == 1:
        return Held(name, tensor, tensor, tuple(tensor.shape)), tensor
    shape = list(tensor.shape)
    first = place * shape[dimension]
    shape[dimension] *= pieces
    cut = (dimension, first)
    return Held(name, tensor, tensor, tuple(shape), cut, complete=False), tensor
