"""verl's own vLLM server in this process, its engine in processes of its own.

``vLLMHttpServer``, the adapter that sends weights and vLLM itself are the real ones; what is
replaced is the Ray actor around the server: a thread with an event loop answers its calls, because
the server's tasks live on one loop, and generation here runs on another every step.

Written against verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import ray

from rlprobe.errors import RunError

#: What verl names the actor of the first server of the policy.
NAME = "vllm_server_0_0"


class LoopActor:
    """A plain object behind the calling convention of a Ray actor, on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=NAME, daemon=True).start()
        self._instance: Any = None

    def make(self, factory: Callable[[], Any]) -> None:
        """Make the object on its loop; ``factory`` is a coroutine function."""
        self._instance = asyncio.run_coroutine_threadsafe(factory(), self._loop).result()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._instance, name)

        async def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = method(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        def remote(*args: Any, **kwargs: Any) -> Any:
            return asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(call(args, kwargs), self._loop)
            )

        return types.SimpleNamespace(remote=remote)

    def close(self) -> None:
        """End the engine's processes."""
        self._instance.engine.shutdown()


def start(config: Any) -> LoopActor:
    """Start vLLM for one policy replica, as verl's hybrid engine does on one device.

    Raises:
        RunError: the policy has several ranks.
    """
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if ranks != 1:
        raise RunError(
            f"vLLM in one process serves one rank, found {ranks}: use `rlprobe run`, which starts "
            "Ray"
        )
    actor = LoopActor()
    _started[:] = [actor]
    policy = config.actor_rollout_ref

    async def make() -> Any:
        server = vLLMHttpServer(
            config=policy.rollout,
            model_config=policy.model,
            rollout_mode=RolloutMode.HYBRID,
            workers=[None],
            replica_rank=0,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="0",
        )
        await server.launch_server()
        return server

    actor.make(make)
    return actor


#: The server that the adapter looks for by its name.
_started: list[LoopActor] = []


def stand_in_for_ray() -> None:
    """What the adapter and the server ask Ray about themselves and each other.

    The adapter is made first, with the policy's worker.
    """
    os.environ["RAY_LOCAL_WORLD_SIZE"] = "1"
    context = types.SimpleNamespace(
        get_job_id=lambda: f"local{os.getpid()}",
        get_actor_name=lambda: NAME,
        get_node_id=lambda: "node",
        namespace="local",
    )
    ray.get_runtime_context = lambda: context
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    ray.get_actor = lambda name, *args, **kwargs: _started[0]
