"""What modules keep beside their parameters: rotary frequencies, masks, running statistics.

``{side}/parts/buffers/{role}-rank{R}.jsonl`` has a line each time a model entered a captured
stage of the trainer: ``step``, ``stage``, ``role``, ``rank`` and ``buffers``, of each ``name``,
``dtype``, ``shape``, ``digest`` (as :mod:`rlprobe.capture.weights` has it), ``norm``, ``sketch``
(61 floats or null) and ``logical``: whether the Hugging Face model has these numbers under that
name.

Registered buffers, persistent or not, and tensors that a module without parameters keeps as plain
attributes (Megatron's rotary frequencies are such). What is on no device, divided (DTensor) or part
of autograd's graph is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from rlprobe.capture.light.sketches import sketch
from rlprobe.capture.light.statistics import has_values
from rlprobe.capture.megatron_places import MegatronPlaces
from rlprobe.capture.names import named_modules, unwrap
from rlprobe.capture.weights import digest, norm


def describe(models: list[nn.Module], with_sketch: bool) -> list[dict[str, Any]]:
    """A record per buffer of ``models``; of one that several modules share, under the first name.

    Args:
        models: the model's chunks.
        with_sketch: add sketches.
    """
    places = MegatronPlaces.of([unwrap(model)[1] for model in models])
    records = []
    for path, module, name, tensor in _kept(models):
        values = sketch(tensor).cpu().tolist() if with_sketch and not tensor.is_complex() else []
        finite = bool(values) and all(math.isfinite(value) for value in values)
        own = None if tensor.is_complex() else float(norm(tensor))
        records.append(
            {
                "name": f"{path}.{name}",
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "digest": digest(tensor),
                "norm": own if own is not None and math.isfinite(own) else None,
                "sketch": [float(value) for value in values] if finite else None,
                "logical": places is None or _is_logical(places, path, module),
            }
        )
    return records


def _kept(models: list[nn.Module]) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    seen: set[int] = set()
    for _, path, module in named_modules(models):
        for name, tensor in [*_registered(module), *_plain(module)]:
            whole = not hasattr(tensor, "placements") and has_values(tensor) and tensor.numel()
            if whole and id(tensor) not in seen:
                seen.add(id(tensor))
                yield path, module, name, tensor.detach()


def _registered(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers(recurse=False)


def _plain(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors in attributes; where there are parameters, they may be views of these (FSDP1)."""
    if any(True for _ in module.parameters(recurse=False)):
        return
    for name, value in sorted(vars(module).items()):
        if type(value) is Tensor and not value.requires_grad and not _is_view(value):
            yield name, value


def _is_view(tensor: Tensor) -> bool:
    return isinstance(tensor._base, nn.Parameter)


def _is_logical(places: MegatronPlaces, path: str, module: nn.Module) -> bool:
    """Of Megatron's, the frequencies of a plain rotary table; a scaled one scales positions."""
    scaled = getattr(module, "seq_len_interpolation_factor", None) is not None
    return places.angles(path, module) is not None and not scaled
