"""vLLM as verl's engine on a CPU: whether it is chosen, and what it needs there."""

from __future__ import annotations

from collections.abc import Iterable

from rlprobe.frameworks.verl.engine import engines
from rlprobe.frameworks.verl.host import plan

_ROLLOUT = "actor_rollout_ref.rollout"
#: What vLLM reads when it is imported.
CPU_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    # GiB of memory for the KV cache, which vLLM otherwise takes half of the machine for
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # the trainer computes on the same cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    # a busy machine takes minutes to load it
    "VLLM_ENGINE_READY_TIMEOUT_S": "3000",
}
#: Small enough to live beside the trainer, and what dumping layers needs.
CPU_OVERRIDES = (
    f"{_ROLLOUT}.enforce_eager=true",
    # it stands for vLLM's batch-invariant kernels, which are Triton's
    f"{_ROLLOUT}.full_determinism=false",
    f"{_ROLLOUT}.free_cache_engine=false",
    f"+{_ROLLOUT}.enable_sleep_mode=false",
    f"{_ROLLOUT}.enable_prefix_caching=false",
    f"{_ROLLOUT}.gpu_memory_utilization=0.1",
    f"{_ROLLOUT}.max_num_seqs=8",
    f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=16",
)


def chosen(overrides: Iterable[str]) -> bool:
    """Whether verl's overrides choose vLLM."""
    config = plan.from_overrides(list(overrides))
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    return bool(rollout.get("name") == engines.VLLM)
