"""What the states that ``controls.rejoin`` keeps take on disk, guessed upwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe import stages
from rlprobe.config import BUILTIN, Alignment

#: Weights and Adam's two moments, kept in fp32.
_BYTES = 3 * 4
#: Bytes of an element in a model's files, where its configuration does not say: the fewest.
_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_LEAST = 2
#: Matrices of a layer that an adapter stands beside.
_ADAPTED = 7


def size(alignment: Alignment, shape: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes and files that the benchmark keeps; (0, 0) where no step is to be joined.

    Args:
        alignment: the alignment.
        shape: the actor's ``config.json``.
    """
    steps = alignment.steps
    joined = steps.end - max(1, steps.start) + 1
    if not alignment.controls.rejoin or joined < 1:
        return 0, 0
    models = [alignment.model.path]
    if alignment.model.critic_path is not None and "critic" in _trained(alignment):
        models.append(alignment.model.critic_path)
    parameters = sum(_parameters(path, shape, _rank(alignment)) for path in models)
    return parameters * _BYTES * joined, 2 * len(models) * alignment.benchmark.world_size * joined


def _trained(alignment: Alignment) -> set[str]:
    if alignment.framework != "verl":
        return {"actor"}
    from rlprobe.frameworks.verl.host import plan

    found = plan.stages_of(plan.from_overrides(list(alignment.overrides)))
    return {stages.MODEL_ROLE[stage] for stage in found if stage in stages.UPDATE_STAGES}


def _rank(alignment: Alignment) -> int:
    """Of the adapters that alone are trained; 0 where whole models are."""
    if alignment.framework != "verl":
        return 0
    from rlprobe.frameworks.verl.host import plan

    actor = plan.from_overrides(list(alignment.overrides)).get("actor_rollout_ref", {})
    return int((actor.get("model") or {}).get("lora_rank") or 0)


def _parameters(path: str, shape: Mapping[str, Any], adapters: int) -> int:
    """How many parameters of a model are trained, by its files, else by its configuration."""
    layers, hidden = int(shape.get("num_hidden_layers", 32)), int(shape.get("hidden_size", 4096))
    inner = int(shape.get("intermediate_size") or 4 * hidden)
    if adapters:
        return layers * _ADAPTED * adapters * (hidden + max(hidden, inner))
    if not path.startswith(BUILTIN):
        weights = [
            file
            for file in Path(path).expanduser().glob("*")
            if file.suffix in (".safetensors", ".bin")
        ]
        dtype = str(shape.get("dtype") or shape.get("torch_dtype") or "")
        if weights:
            return sum(file.stat().st_size for file in weights) // _ELEMENT.get(dtype, _LEAST)
    experts = int(shape.get("num_experts") or shape.get("num_local_experts") or 0)
    expert = int(shape.get("moe_intermediate_size") or inner)
    vocabulary = int(shape.get("vocab_size", 1 << 17))
    layer = 4 * hidden**2 + 3 * hidden * (inner + experts * expert)
    return layers * layer + 2 * vocabulary * hidden
