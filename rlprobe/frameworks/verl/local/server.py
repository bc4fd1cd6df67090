"""Generation without Ray: verl's agent loop, reward worker and the CPU server as plain objects.

verl awaits ``actor.method.remote(...)``; :class:`LocalActor` answers that with a coroutine, so the
agent loop, the load of rewards and the server are verl's and rlprobe's own code, unchanged.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from typing import Any

from ray import cloudpickle
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.workers.rollout.llm_server import LLMServerClient

from rlprobe.frameworks.verl.engine import engines
from rlprobe.frameworks.verl.engine.cpu_rollout import CpuAdapter, CpuServer


class LocalActor:
    """A plain object behind the calling convention of a Ray actor. Arguments are copied."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> _RemoteMethod:
        return _RemoteMethod(getattr(self._instance, name))


class _RemoteMethod:
    def __init__(self, method: Any) -> None:
        self._method = method

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cloudpickle.loads(cloudpickle.dumps((args, kwargs)))
        result = self._method(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


#: The server of this process; :class:`LocalAdapter` hands it the policy's weights.
_servers: list[Any] = []


def close() -> None:
    """End an engine that runs in processes of its own."""
    for server in _servers:
        if not isinstance(server, LocalActor):
            server.close()
    _servers.clear()


class LocalServers:
    """Stands in for verl's ``LLMServerManager``: one server here, or none for a replay."""

    def __init__(self, config: Any) -> None:
        self._config = config
        rollout = config.actor_rollout_ref.rollout
        if rollout.name == engines.CPU:
            from verl.utils.config import omega_conf_to_dataclass

            model = config.actor_rollout_ref.model
            override = model.get("override_config") or {}
            server = CpuServer(
                model.path,
                omega_conf_to_dataclass(rollout),
                0,
                override.get("attn_implementation", "eager"),
            )
            _servers[:] = [LocalActor(server)]
        elif rollout.name == engines.VLLM:
            from rlprobe.frameworks.verl.local import vllm_server

            _servers[:] = [vllm_server.start(config)]

    @classmethod
    def create(
        cls, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None
    ) -> LocalServers:
        return cls(config)

    def get_client(self) -> _LocalClient:
        return _LocalClient(self._config)

    def get_replicas(self) -> list[Any]:
        """No replica to put to sleep or to wake."""
        return []


class _LocalClient(LLMServerClient):
    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        return "local", _servers[0]

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """There is no load to balance."""


class LocalAdapter(CpuAdapter):
    """Hands the policy to this process's server; ranks in other processes have none."""

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: Any = None, **_: Any
    ) -> None:
        named = [(name, value.detach().to("cpu", copy=True)) for name, value in weights]
        if int(os.environ["RANK"]) == 0:
            await _servers[0].load_weights.remote(named, global_steps)


class LocalAgentLoops(AgentLoopManager):
    """verl's agent loops in this process."""

    async def _init_agent_loop_workers(self) -> None:
        self.agent_loop_workers = [
            LocalActor(
                AgentLoopWorker(
                    self.config,
                    self.llm_client,
                    self.teacher_client,
                    self.reward_loop_worker_handles,
                )
            )
            for _ in range(self.rollout_config.agent.num_workers)
        ]


class _LocalRewardWorker(RewardLoopWorker):
    async def compute_score(self, data: Any) -> Any:
        # a Ray actor has one event loop for life; here each step's generation runs in its own
        self.loop = self.reward_manager.loop = asyncio.get_running_loop()
        return await super().compute_score(data)


class LocalRewardLoops(RewardLoopManager):
    """verl's reward workers in this process."""

    def _init_reward_loop_workers(self) -> None:
        self.reward_loop_workers = [
            LocalActor(_LocalRewardWorker(self.config, self.reward_router_address))
            for _ in range(self.config.reward.num_workers)
        ]
