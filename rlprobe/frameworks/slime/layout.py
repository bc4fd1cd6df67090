"""Where this process stands in Megatron's parallel layout."""

from __future__ import annotations

import sys
from typing import Any


def layout() -> dict[str, Any]:
    """Sizes and ranks of the parallel groups; empty before Megatron has set them up."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is None or not mpu.model_parallel_is_initialized():
        return {}
    return {
        "backend": "megatron",
        "tp": mpu.get_tensor_model_parallel_world_size(),
        "pp": mpu.get_pipeline_model_parallel_world_size(),
        "dp": mpu.get_data_parallel_world_size(with_context_parallel=False),
        "cp": mpu.get_context_parallel_world_size(),
        "ep": mpu.get_expert_model_parallel_world_size(),
    }


def data_parallel_size() -> int:
    """Ranks whose gradients are added up, context-parallel ones included; 1 outside Megatron."""
    mpu = sys.modules.get("megatron.core.parallel_state")
    if mpu is None or not mpu.model_parallel_is_initialized():
        return 1
    return int(mpu.get_data_parallel_world_size(with_context_parallel=True))
