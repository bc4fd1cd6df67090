"""What the weights were: a digest, a norm and a sketch of every parameter.

``{side}/parts/weights/{role}-rank{R}.jsonl`` has a line per parameter each time a model entered
a captured stage: ``step``, ``stage``, ``role``, ``rank``, ``name``, ``dtype``, ``shape`` (whole),
``local_shape``, ``offset`` (``{"dim", "index"}`` of a slice, ``{"element"}`` of a stretch, null
when whole or unknown), ``digest``, ``norm``, ``sketch`` (61 floats or null), ``complete``.

The digest is ``sha256:`` over the elements' bytes in row-major order, little-endian, in the
parameter's own dtype; name, dtype and shape stand beside it and are not hashed. For a shard it
covers the shard alone: equal layouts compare digests, others compare sums of sketches.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlprobe.capture import engine_adapters
from rlprobe.capture.engine_parameters import EngineParameters
from rlprobe.capture.fused_parameters import FusedParameters
from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.parameters import Held, held

#: Bytes hashed at a time: large weights are copied from the device piece by piece.
_PIECE = 1 << 26


def digest(tensor: Tensor) -> str:
    """``sha256:`` of a tensor's elements (see the module's text); any device, any strides."""
    if sys.byteorder != "little":
        raise NotImplementedError("digests are defined over little-endian bytes")
    hasher = hashlib.sha256()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].cpu()
        hasher.update(memoryview(piece.numpy()))
    return f"sha256:{hasher.hexdigest()}"


def describe(
    models: list[nn.Module], with_sketch: bool, by_expert: bool = False
) -> list[dict[str, Any]]:
    """A record per parameter of ``models`` (without step, stage, role and rank).

    Args:
        models: the model's chunks.
        with_sketch: add sketches.
        by_expert: weights of stacked experts apart.
    """
    records: list[dict[str, Any]] = []
    norms: list[Tensor | None] = []
    sketches: list[Tensor | None] = []
    for item, local in _apart(models, by_expert):
        readable = has_values(local)
        records.append(_record(item, local, readable))
        norms.append(norm(local) if readable else None)
        sketches.append(item.sketch_of(local) if readable and with_sketch else None)
    for record, own, sketch in zip(records, norms, sketches, strict=True):
        record["norm"] = None if own is None else float(own)
        values = None if sketch is None else [float(v) for v in sketch.cpu().tolist()]
        finite = values is not None and all(math.isfinite(v) for v in values)
        record["sketch"] = values if finite else None
    return records


def _apart(models: list[nn.Module], by_expert: bool) -> Iterator[tuple[Held, Tensor]]:
    """Every parameter with its values, those of fused projections apart; an engine's adapters."""
    projections, engine = FusedParameters(models, by_expert), EngineParameters(models)
    for item in held(models):
        for part, tensor in engine.apart(item, item.local):
            yield from projections.apart(part, tensor)
    yield from engine_adapters.held(models)


def norm(tensor: Tensor) -> Tensor:
    """L2 norm in fp32 at least; a scalar."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    values = tensor if tensor.is_floating_point() else tensor.to(wide)
    return torch.linalg.vector_norm(values, dtype=wide)


def _record(item: Held, local: Tensor, readable: bool) -> dict[str, Any]:
    return {
        "name": item.name,
        "dtype": str(local.dtype),
        "shape": list(item.shape),
        "local_shape": list(local.shape),
        "offset": item.offsets(),
        "digest": digest(local) if readable and item.exact else None,
        "complete": item.complete,
    }
