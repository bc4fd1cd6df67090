"""Rollout engines that verl does not have: none at all for a replay, and one on the CPU.

Registered by name only, so that nothing of an inference engine is imported unless it is used.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

#: ``actor_rollout_ref.rollout.name`` of a replay: no inference engine is started.
REPLAY = "rlprobe_replay"
#: ``actor_rollout_ref.rollout.name`` of generation on the CPU with transformers.
CPU = "rlprobe_cpu"
#: verl's own names of its engines.
VLLM, SGLANG = "vllm", "sglang"

_PACKAGE = "rlprobe.frameworks.verl"


def register_replicas(module: ModuleType) -> None:
    """Add both engines to verl's registry of server replicas."""
    module.RolloutReplicaRegistry.register(REPLAY, _replay_replica)
    module.RolloutReplicaRegistry.register(CPU, _cpu_replica)


def register_adapters(module: ModuleType) -> None:
    """Add both engines' worker-side adapters; verl keeps these in a private table."""
    module._ROLLOUT_REGISTRY[(REPLAY, "async")] = f"{_PACKAGE}.replay.no_engine.NoEngineAdapter"
    module._ROLLOUT_REGISTRY[(CPU, "async")] = f"{_PACKAGE}.engine.cpu_rollout.CpuAdapter"


def _replay_replica() -> Any:
    from rlprobe.frameworks.verl.replay.no_engine import NoEngineReplica

    return NoEngineReplica


def _cpu_replica() -> Any:
    from rlprobe.frameworks.verl.engine.cpu_rollout import CpuReplica

    return CpuReplica
