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
    """Start vLLM for one policy replica, as verl's hybrid engine does on one node.

    Raises:
        RunError: the policy has more ranks than the engine has workers: several replicas.
    """
    policy = config.actor_rollout_ref
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    workers = policy.rollout.tensor_model_parallel_size
    if ranks != workers:
        raise RunError(
            f"vLLM in one process is one engine: found {ranks} ranks and "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={workers}; make them the same, "
            "or set ray: true"
        )
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    actor = LoopActor()
    _started[:] = [actor]

    async def make() -> Any:
        server = vLLMHttpServer(
            config=policy.rollout,
            model_config=policy.model,
            rollout_mode=RolloutMode.HYBRID,
            workers=[None] * ranks,
            replica_rank=0,
            node_rank=0,
            gpus_per_node=ranks,
            nnodes=1,
            cuda_visible_devices=",".join(map(str, range(ranks))),
        )
        await server.launch_server()
        return server

    actor.make(make)
    return actor


#: The server that the adapter looks for by its name.
_started: list[LoopActor] = []


def stand_in_for_ray(ranks: int) -> None:
    """What the adapters and the server ask Ray about themselves and each other.

    To be called before the other ranks are forked: each of them sends its worker of the engine the
    weights, by a name that both make of the job's. Adapters are made first, with the policy's
    workers.
    """
    os.environ["RAY_LOCAL_WORLD_SIZE"] = str(ranks)
    job = f"local{os.getpid()}"
    context = types.SimpleNamespace(
        get_job_id=lambda: job,
        get_actor_name=lambda: NAME,
        get_node_id=lambda: "node",
        namespace="local",
    )
    ray.get_runtime_context = lambda: context
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    ray.get_actor = lambda name, *args, **kwargs: _started[0]
