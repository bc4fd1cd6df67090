"""Where this process stands in Megatron's parallel layout."""

from __future__ import annotations

import sys
from typing import Any

_SIZES = {
    "tp": "get_tensor_model_parallel_{}",
    "pp": "get_pipeline_model_parallel_{}",
    "cp": "get_context_parallel_{}",
    "ep": "get_expert_model_parallel_{}",
}


def layout(models: Any = None) -> dict[str, Any]:
    """Sizes and this rank's place of each parallel group; empty before Megatron has set them up.

    Args:
        models: the model chunks of this rank; they tell whether sequences are sharded and how many
            virtual pipeline stages there are.
    """
    mpu = _parallel_state()
    if mpu is None:
        return {}
    found: dict[str, Any] = {
        "backend": "megatron",
        "dp": mpu.get_data_parallel_world_size(with_context_parallel=False),
        "dp_rank": mpu.get_data_parallel_rank(with_context_parallel=False),
    }
    for name, getter in _SIZES.items():
        found[name] = getattr(mpu, getter.format("world_size"))()
        found[f"{name}_rank"] = getattr(mpu, getter.format("rank"))()
    chunks = models if isinstance(models, (list, tuple)) else [] if models is None else [models]
    found["chunks"] = max(1, len(chunks))
    # activations of a rank are then a part of the sequence and not the whole
    found["sequence_parallel"] = any(_config(c, "sequence_parallel") for c in chunks)
    return found


def expert_tensor() -> tuple[int, int]:
    """Over how many ranks each expert is divided, and this rank's number among them.

    They may be others than attention's (megatron-core from 0.9 on).
    """
    mpu = _parallel_state()
    if mpu is None:
        return 1, 0
    kind = "expert_tensor" if hasattr(mpu, "get_expert_tensor_parallel_rank") else "tensor_model"
    size, rank = (getattr(mpu, f"get_{kind}_parallel_{what}") for what in ("world_size", "rank"))
    return int(size()), int(rank())


def data_parallel_size() -> int:
    """Ranks whose gradients are added up, context-parallel ones included; 1 outside Megatron."""
    mpu = _parallel_state()
    return 1 if mpu is None else int(mpu.get_data_parallel_world_size(with_context_parallel=True))


def _parallel_state() -> Any:
    """Megatron's module of that name; None before it has set its groups up."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    return mpu if mpu is not None and mpu.model_parallel_is_initialized() else None


def _config(model: Any, name: str) -> bool:
    while model is not None:
        config = getattr(model, "config", None)
        if config is not None and hasattr(config, name):
            return bool(getattr(config, name))
        model = getattr(model, "module", None)
    return False
