"""A run of verl's older trainer without Ray: the same computation, started in a fraction of a
second.

verl's task runner, trainer, workers, agent loop and our hooks run as they are; only what carries
calls between processes is replaced, by :mod:`localworkers` and :mod:`localserver`. A run's records,
weights and metrics equal those of the same run under Ray bit for bit (tests/e2e/test_inprocess.py).

    python -m rlprobe.frameworks.verl.local.inprocess

is a server: it imports torch and verl once, with the environment it was started with, and forks a
child for each request, a JSON line ``{"session", "overrides", "log"}`` on its standard input,
answered by ``{"status", "seconds", "cpu"}`` when the child has ended.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from typing import Any

from rlprobe import imports
from rlprobe.capture.session import ENV
from rlprobe.errors import RlprobeError, RunError
from rlprobe.frameworks import verl

#: Loaded before the first fork, so that a child does not load them again.
_PRELOADED = (
    "verl.trainer.main_ppo",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "verl.utils.dataset.rl_dataset",
    "rlprobe.frameworks.verl.driver",
    "rlprobe.frameworks.verl.replay.generation",
    "rlprobe.frameworks.verl.local.server",
    "rlprobe.frameworks.verl.local.workers",
    "rlprobe.frameworks.verl.replay.no_engine",
    "rlprobe.frameworks.verl.workers",
    "rlprobe.capture.configurations",
    "rlprobe.capture.light.engine",
    "msprobe.pytorch",
    # imported by verl and torch when they are first needed
    "torch.distributed.checkpoint.state_dict",
    "torch.nested._internal.ops",
    "transformers.models.qwen2.modeling_qwen2",
    "verl.experimental.reward_loop.reward_manager",
    "verl.trainer.ppo.rollout_corr_helper",
    "verl.utils.debug.metrics",
    "verl.workers.reward_manager",
)
#: Likewise of a run whose engine is vLLM, as this module among those that verl loads says.
_VLLM = "verl.workers.rollout.vllm_rollout.vllm_async_server"
_OF_VLLM = "rlprobe.frameworks.verl.cpu.vllm"

#: Overrides that say where a run's output goes, and nothing about what it computes.
_PLACES = ("hydra.", "trainer.default_local_dir=")


@functools.lru_cache(maxsize=16)
def _composed(overrides: tuple[str, ...]) -> Any:
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", list(overrides))


def compose(overrides: list[str]) -> Any:
    """verl's configuration for a command line's Hydra overrides.

    Composing takes a second or two, so the result is kept for all that differ in no more than
    where a run's output goes.
    """
    from omegaconf import OmegaConf

    own = [o for o in overrides if o.startswith(_PLACES)]
    config = copy.deepcopy(_composed(tuple(o for o in overrides if o not in own)))
    for key, _, value in (override.partition("=") for override in own):
        if not key.startswith("hydra."):
            OmegaConf.update(config, key, value)
    return config


def train(overrides: list[str]) -> None:
    """Run ``python -m verl.trainer.main_ppo OVERRIDES`` in this process.

    The session is found as in any other process, by ``RLPROBE_CONFIG``.

    Raises:
        RunError: the configuration asks for what only Ray can give.
    """
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from rlprobe.frameworks.verl import control
    from rlprobe.frameworks.verl.engine import engines
    from rlprobe.frameworks.verl.local import server
    from rlprobe.frameworks.verl.local.workers import Ranks

    config = compose(overrides)
    _refuse(config)
    auto_set_device(config)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    if config.actor_rollout_ref.rollout.get("full_determinism"):
        os.environ["VERL_FULL_DETERMINISM"] = "1"
    # verl 0.8 asks the configuration nothing
    asked = (config,) if inspect.signature(get_ppo_ray_runtime_env).parameters else ()
    for name, value in get_ppo_ray_runtime_env(*asked)["env_vars"].items():
        os.environ.setdefault(name, value)
    values: dict[str, Any] = {}
    control.use_local(values)
    # before the other ranks are forked: they need it as well
    _carry_calls_without_ray()
    world_size = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if config.actor_rollout_ref.rollout.name == engines.VLLM:
        from rlprobe.frameworks.verl.local import vllm_server

        vllm_server.stand_in_for_ray(world_size)
    ranks = Ranks(world_size, values)
    try:
        _task_runner(ranks).run(config)
    finally:
        server.close()
        ranks.close()


def _refuse(config: Any) -> None:
    wanted = {
        "trainer.use_v1": bool(config.trainer.get("use_v1")),
        "reward.reward_model.enable": bool(config.reward.reward_model.enable),
        "distillation.enabled": bool(config.distillation.enabled),
    }
    found = [key for key, on in wanted.items() if on]
    if found:
        raise RunError(f"{', '.join(found)} is on: such a run needs Ray (use `rlprobe run`)")


def _task_runner(ranks: Any) -> Any:
    from verl.single_controller.base import ResourcePool
    from verl.single_controller.ray.base import ResourcePoolManager, _unwrap_ray_remote

    from rlprobe.frameworks.verl.local.workers import ColocatedGroups

    class Pools(ResourcePoolManager):
        """Resource pools that reserve nothing."""

        def create_resource_pool(self) -> None:
            for name, processes in self.resource_pool_spec.items():
                self.resource_pool_dict[name] = ResourcePool(processes, max_colocate_count=3)

    def groups(resource_pool: Any, ray_cls_with_init: Any, **kwargs: Any) -> ColocatedGroups:
        return ColocatedGroups(ranks, ray_cls_with_init)

    # verl 0.8 has one trainer, and its runner beside the command's own function
    home = "main_ppo_v0" if importlib.util.find_spec("verl.trainer.main_ppo_v0") else "main_ppo"
    runner = importlib.import_module(f"verl.trainer.{home}").TaskRunner

    class InProcessTaskRunner(_unwrap_ray_remote(runner)):  # type: ignore[misc]
        """verl's task runner with the groups of this process."""

        def add_actor_rollout_worker(self, config: Any) -> tuple[Any, Any]:
            cls, _ = super().add_actor_rollout_worker(config)
            return cls, groups

        def init_resource_pool_mgr(self, config: Any) -> Any:
            made = super().init_resource_pool_mgr(config)
            return Pools(resource_pool_spec=made.resource_pool_spec, mapping=made.mapping)

    return InProcessTaskRunner()


def _carry_calls_without_ray() -> None:
    """Replace, in this process, the names through which verl reaches for Ray."""
    import ray
    import verl.checkpoint_engine as checkpoint_engine
    import verl.experimental.agent_loop as agent_loop
    import verl.experimental.reward_loop as reward_loop
    import verl.trainer.ppo.ray_trainer as ray_trainer
    import verl.utils.ray_utils as ray_utils
    import verl.workers.rollout.base as rollout

    from rlprobe.frameworks.verl.engine import engines
    from rlprobe.frameworks.verl.local import server

    class Checkpoints(checkpoint_engine.CheckpointEngineManager):
        """Weights to the rollout of this process; replicas, there are none."""

        def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
            # verl 0.8 calls it the trainer
            actor = self.actor_wg if hasattr(self, "actor_wg") else self.trainer
            actor.update_weights(global_steps=global_steps, mode=self.backend).get()
            return {}

    ray_trainer.create_colocated_worker_cls = lambda class_dict: class_dict
    ray_trainer.LLMServerManager = server.LocalServers
    reward_loop.RewardLoopManager = server.LocalRewardLoops
    agent_loop.AgentLoopManager = server.LocalAgentLoops
    checkpoint_engine.CheckpointEngineManager = Checkpoints
    # the workers' side pickles what it is given; nothing has to be put anywhere
    ray_utils.parallel_put = lambda data_list, max_workers=None: list(data_list)
    # what is not replaced here must not start a cluster unasked
    ray.init = _refuse_ray
    adapter = server.LocalAdapter
    rollout._ROLLOUT_REGISTRY[(engines.CPU, "async")] = f"{adapter.__module__}.{adapter.__name__}"


def _refuse_ray(*args: Any, **kwargs: Any) -> None:
    raise RunError("this configuration reaches for Ray in one process; use `rlprobe run`")


def _child(request: dict[str, Any]) -> int:
    """Run one request with its output in its log; the exit status."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ[ENV] = request["session"]
    os.environ.update(request.get("environment", {}))
    try:
        train(request["overrides"])
    except RlprobeError as error:
        traceback.print_exc()
        sys.stderr.write(f"rlprobe: error: {error}\n")
        return error.exit_code
    except BaseException:  # noqa: BLE001  the parent reports the status; the log has the traceback
        traceback.print_exc()
        return 1
    return 0


def _fork(request: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    compose(request["overrides"])  # kept for the children to come
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = _child(request)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    _, status, used = os.wait4(pid, 0)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - began,
        "cpu": used.ru_utime + used.ru_stime,
    }


def preload() -> None:
    """Import what a run needs, torch and verl above all."""
    with imports.uncollected():
        from transformers import AutoModelForImageTextToText

        for name in _PRELOADED:
            importlib.import_module(name)
        if _OF_VLLM in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
            importlib.import_module(_VLLM)
        # verl looks a model's class up in these keys, which loads every configuration there is
        list(AutoModelForImageTextToText._model_mapping.keys())


def serve() -> None:
    """Answer requests on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print while they load
    verl.activate()
    preload()
    for line in sys.stdin:
        answers.write(json.dumps(_fork(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
