"""Megatron's module names as the Hugging Face model spells them, the same on every rank.

A pipeline stage numbers its layers from 0, a virtual pipeline splits them into chunks, and expert
parallelism numbers each rank's experts from 0: one name then means different modules on different
ranks. Here a layer carries its global number (Megatron keeps it in ``layer_number``, from 1) and
an expert its global index (``local_expert_indices`` of the MoE layer), and modules that mean the
same as a Hugging Face module have its name, so that a Megatron dump meets an FSDP or Hugging Face
one. Modules that exist on one side only keep a name of their own: ``qkv_proj`` and ``gate_up_proj``
are Megatron's fused projections, ``core_attention`` is attention without its projections.

Works on the modules alone (megatron-core from 0.9 on); nothing of Megatron is imported.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlprobe.logical.names import FUSED_NORM, INNER, LINEAR, OUTER

#: Where a decoder layer stands: ``decoder.layers.3``, and the same below a vision-language model.
_LAYER = re.compile(r"^(?P<outer>(?:[a-z_]+\.)*?)decoder\.layers\.(?P<index>[0-9]+)(?:\.|$)")
_LOCAL_EXPERT = re.compile(r"^(?P<head>.*\bmlp\.experts)\.local_experts\.(?P<index>[0-9]+)(?=\.|$)")
#: Grouped experts are one module with one weight per expert: ``experts.linear_fc1.weight3``.
_GROUPED_EXPERT = re.compile(
    r"^(?P<head>.*\bmlp\.experts)\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<index>[0-9]+)$"
)


class MegatronNames:
    """Names of the modules and parameters of the model chunks that this rank holds.

    Args:
        chunks: the models without their wrappers, in Megatron's order (one per virtual stage).
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._layers = [dict(_layer_numbers(chunk)) for chunk in chunks]
        self._experts = [dict(_expert_indices(chunk)) for chunk in chunks]
        self._latent = any(_is_latent(chunk) for chunk in chunks)
        self._value_head = [_has_value_head(chunk) for chunk in chunks]
        #: Whether the first projection of an MLP is a gate and an up projection in one.
        self.gated = any(_is_gated(chunk) for chunk in chunks)

    @classmethod
    def of(cls, chunks: Sequence[Any]) -> MegatronNames | None:
        """Names for Megatron's models, or None where the models are not Megatron's."""
        return cls(chunks) if chunks and all(is_megatron(chunk) for chunk in chunks) else None

    def module(self, chunk: int, path: str) -> str:
        """The Hugging Face path of the module at ``path`` of a chunk.

        Args:
            chunk: the chunk's position in the list.
            path: the module's path in the chunk, without wrappers: ``decoder.layers.0.mlp``.
        """
        found = _LAYER.match(path)
        if found is None:
            return self._outside(chunk, path)
        layer = path[: found.end()].rstrip(".")
        number = self._layers[chunk].get(layer, int(found["index"]))
        inner = self._inside(chunk, path, path[found.end() :])
        head = f"{_model(found['outer'])}layers.{number}"
        return f"{head}.{inner}" if inner else head

    def parameter(self, chunk: int, path: str) -> str:
        """The Hugging Face path of a parameter: ``model.layers.7.mlp.down_proj.weight``."""
        found = _LAYER.match(path)
        if found is not None:
            inner = path[found.end() :]
            for fused, norm in FUSED_NORM.items():
                if inner.startswith(fused):
                    layer = self.module(chunk, path[: found.end()].rstrip("."))
                    return f"{layer}.{norm}{inner[len(fused) :]}"
            grouped = _GROUPED_EXPERT.match(path)
            if grouped is not None:
                experts = self.module(chunk, grouped["head"])
                index = self._expert(chunk, grouped["head"], int(grouped["index"]))
                return f"{experts}.{index}.{LINEAR[grouped['linear']]}.{grouped['kind']}"
        module, _, leaf = path.rpartition(".")
        return f"{self.module(chunk, module)}.{leaf}" if module else leaf

    def _outside(self, chunk: int, path: str) -> str:
        outer, rest = _vision_language(path)
        for component in sorted(OUTER, key=len, reverse=True):
            if rest == component or rest.startswith(component + "."):
                name = OUTER[component]
                if name == "lm_head":
                    # a critic's last layer gives one value a token
                    name = "score" if self._value_head[chunk] else name
                    return name + rest[len(component) :]
                return _model(outer) + name.removeprefix("model.") + rest[len(component) :]
        return path

    def _inside(self, chunk: int, path: str, inner: str) -> str:
        expert = _LOCAL_EXPERT.match(path)
        if expert is not None:
            index = self._expert(chunk, expert["head"], int(expert["index"]))
            parts = path[expert.end() :].lstrip(".").split(".")
            within = [LINEAR.get(part, part) for part in parts if part]
            return ".".join(["mlp.experts", str(index), *within])
        if self._latent and inner == "self_attention.q_layernorm":
            return "self_attn.q_a_layernorm"
        for component in sorted(INNER, key=len, reverse=True):
            if inner == component or inner.startswith(component + "."):
                return INNER[component] + inner[len(component) :]
        # shared experts, and grouped experts seen as modules
        return ".".join(LINEAR.get(part, part) for part in inner.split("."))

    def _expert(self, chunk: int, experts: str, local: int) -> int:
        indices = self._experts[chunk].get(experts.rpartition(".")[0], ())
        return indices[local] if local < len(indices) else local


@dataclass(frozen=True)
class Shard:
    """What a tensor-parallel rank holds of a parameter."""

    #: Shape of the whole.
    shape: tuple[int, ...]
    #: ``(dimension, first index)``, or None where the rank's part is no one slice of the whole.
    cut: tuple[int, int] | None
    #: Then the rows of the whole that it is, ``(first, how many)`` in order; empty where unknown.
    pieces: tuple[tuple[int, int], ...] = ()


#: Sizes of Megatron's divided layers, and the dimension of their weight that each is.
_DIVIDED = (("output_size", 0), ("num_embeddings", 0), ("input_size", 1))


def divided(model: Any) -> dict[int, int]:
    """By the id of a weight that is one rank's part: the dimension that it is cut along.

    As its layer says, which knows the whole size and its own: weights themselves are marked by what
    initialises them, and so are not where a checkpoint is loaded into a model that nothing has
    initialised (``--no-initialization``).

    Args:
        model: a chunk.
    """
    found: dict[int, int] = {}
    for module in model.modules():
        for size, dim in _DIVIDED:
            whole = getattr(module, size, None)
            part = getattr(module, f"{size}_per_partition", None)
            if isinstance(whole, int) and isinstance(part, int) and part < whole:
                found[id(getattr(module, "weight", None))] = dim
    return found


def shard(name: str, parameter: Any, gated: bool, dim: int | None = None) -> Shard | None:
    """This rank's part of a Megatron parameter; None where it holds the whole.

    Megatron marks sharded parameters with ``tensor_model_parallel``, ``partition_dim`` and
    ``partition_stride``, as it initialises them. Of a gated MLP's first projection each rank holds
    a part of the gate and a part of the up projection, which lie apart in the whole.

    Args:
        name: the parameter's name by :meth:`MegatronNames.parameter`.
        parameter: the parameter.
        gated: whether MLPs have a gate.
        dim: the dimension that it is cut along, where its layer says so (:func:`divided`).
    """
    mpu = sys.modules.get("megatron.core.parallel_state")
    stride = 1
    if getattr(parameter, "tensor_model_parallel", False):
        dim, stride = parameter.partition_dim, parameter.partition_stride
    if dim is None or mpu is None:
        return None
    # experts have tensor-parallel groups of their own; Megatron marks them by what reduces them
    kind = "tensor_model" if getattr(parameter, "allreduce", True) else "expert_tensor"
    size = getattr(mpu, f"get_{kind}_parallel_world_size")()
    if size == 1:
        return None
    shape = list(parameter.shape)
    first = shape[dim] * getattr(mpu, f"get_{kind}_parallel_rank")()
    shape[dim] *= size
    if gated and ".gate_up_proj." in f".{name}.":
        half = parameter.shape[dim] // 2
        rows = tuple((begin + first // 2, half) for begin in (0, shape[dim] // 2))
        return Shard(tuple(shape), None, rows if dim == 0 else ())
    return Shard(tuple(shape), (dim, first) if stride == 1 else None)


def is_megatron(model: Any) -> bool:
    """Whether a model is one of Megatron's, told by the modules its classes come from."""
    return any(base.__module__.partition(".")[0] == "megatron" for base in type(model).__mro__)


def _layer_numbers(chunk: Any) -> Iterator[tuple[str, int]]:
    for path, module in chunk.named_modules():
        number = getattr(module, "layer_number", None)
        found = _LAYER.match(path)
        if found and found.end() == len(path) and isinstance(number, int):
            yield path, number - 1


def _expert_indices(chunk: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path, module in chunk.named_modules():
        indices = getattr(module, "local_expert_indices", None)
        if isinstance(indices, (list, tuple)):
            yield path, tuple(int(index) for index in indices)


def _is_latent(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "config", None), "multi_latent_attention", False))


def _is_gated(chunk: Any) -> bool:
    return bool(getattr(getattr(chunk, "config", None), "gated_linear_unit", False))


def _has_value_head(chunk: Any) -> bool:
    weight = getattr(getattr(chunk, "output_layer", None), "weight", None)
    return weight is not None and weight.dim() == 2 and weight.shape[0] == 1


def _vision_language(path: str) -> tuple[str, str]:
    head = "language_model."
    return (head, path[len(head) :]) if path.startswith(head) else ("", path)


def _model(outer: str) -> str:
    """The prefix of a decoder: ``model.`` and, in a vision-language model, the part's name."""
    return f"model.{outer}"
