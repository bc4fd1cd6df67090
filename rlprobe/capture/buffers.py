"""What a model computes with besides its parameters: tables, masks, running statistics.

``{side}/parts/buffers/{role}-rank{R}.jsonl`` has a line per buffer each time a model entered a
captured stage, at every captured step: ``step``, ``stage``, ``role``, ``rank``, ``name`` (Hugging
Face path without wrappers), ``dtype``, ``shape``, ``digest`` (as of weights), ``norm``, ``sketch``
(61 floats or null). Buffers are what ``torch.nn.Module.register_buffer`` registered and, of
Megatron's models, tensors that a module without parameters keeps as plain attributes (its rotary
frequencies). Sharded ones are left out: nobody shards buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlprobe.capture.light.sketches import sketch
from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.megatron_names import MegatronNames
from rlprobe.capture.names import parameter_name, unwrap
from rlprobe.capture.weights import digest, norm


def describe(models: list[nn.Module], with_sketch: bool) -> list[dict[str, Any]]:
    """A record per buffer of ``models`` (without step, stage, role and rank).

    Args:
        models: the model's chunks.
        with_sketch: add sketches, of buffers of numbers.
    """
    records = []
    for name, buffer in held(models):
        numbers = buffer.is_floating_point() and buffer.numel() > 0
        values = sketch(buffer).cpu().tolist() if with_sketch and numbers else None
        size = float(norm(buffer)) if not buffer.is_complex() else math.nan
        records.append(
            {
                "name": name,
                "dtype": str(buffer.dtype),
                "shape": list(buffer.shape),
                "digest": digest(buffer),
                "norm": size if math.isfinite(size) else None,
                "sketch": values if values and all(map(math.isfinite, values)) else None,
            }
        )
    return records


def held(models: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every buffer whose numbers lie on this rank, under its Hugging Face name; each name once."""
    megatron = MegatronNames.of([unwrap(model)[1] for model in models])
    seen: set[str] = set()
    for index, model in enumerate(models):
        prefix, inner = unwrap(model)
        chunk = f"{index}." if len(models) > 1 else ""
        found = model.named_buffers()
        if megatron is not None:
            found = (*found, *_attributes(inner, prefix))
        for raw, buffer in found:
            path = parameter_name(raw, prefix)
            if megatron is None:
                name = chunk + path
            else:
                module, _, leaf = path.rpartition(".")
                name = f"{megatron.module(index, module)}.{leaf}" if module else leaf
            # a DTensor's or a freed one's numbers are not here
            if name not in seen and not hasattr(buffer, "_local_tensor") and has_values(buffer):
                seen.add(name)
                yield name, buffer.detach()


def _attributes(model: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules without parameters and buffers keep beside them."""
    for path, module in model.named_modules():
        if next(module.parameters(), None) is not None:
            continue
        for leaf, value in vars(module).items():
            plain = isinstance(value, Tensor) and not value.requires_grad
            if plain and not leaf.startswith("_"):
                yield f"{prefix}{path}.{leaf}" if path else f"{prefix}{leaf}", value
