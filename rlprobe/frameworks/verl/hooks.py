"""Which of verl's methods are wrapped, registered for the moment verl is imported.

Nothing here imports verl. Without a session every wrapper calls straight through, so a verl that
lacks a hook point is refused only when something was asked of it: at import when ``RLPROBE_CONFIG``
is set, else when the trainer is built (see :func:`.installed.require_all`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlprobe.capture.session import ENV
from rlprobe.errors import HookError
from rlprobe.frameworks.engines import hooks as engine_hooks
from rlprobe.frameworks.imports import when_imported
from rlprobe.frameworks.verl import installed
from rlprobe.frameworks.wrap import wrap_family


def register() -> None:
    """Register every hook point of the versions known (see :mod:`.versions`)."""
    for module, patch in {**_PATCHES, **_SERVERS}.items():
        when_imported(module, functools.partial(_apply, patch))
    # a spawned process of an engine's, which reads the session that its server handed over
    engine_hooks.register()


def _apply(patch: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        patch(module)
    except (HookError, AttributeError) as error:
        installed.missing(
            f"verl {installed.version()}: hook point in {module.__name__} is not as expected "
            f"({error}); this version cannot be captured until rlprobe knows it"
        )
        if os.environ.get(ENV):
            installed.require_all()


def _workers(module: ModuleType) -> None:
    from rlprobe.frameworks.verl import workers

    wrap_family(
        module.ActorRolloutRefWorker,
        {
            "compute_log_prob": workers.around_stage,
            "compute_ref_log_prob": workers.around_stage,
            "update_actor": workers.around_stage,
        },
        framework="verl",
    )
    wrap_family(
        module.TrainingWorker,
        {
            "infer_batch": workers.around_stage,
            "train_mini_batch": workers.around_stage,
            "train_batch": workers.around_stage,
            "reset": workers.around_reset,
        },
        framework="verl",
    )


def _runtime_env(module: ModuleType) -> None:
    original = module.get_ppo_ray_runtime_env

    @functools.wraps(original)
    def get_ppo_ray_runtime_env(*args: Any, **kwargs: Any) -> dict[str, Any]:
        from rlprobe.frameworks.verl import driver

        return driver.with_variables(original(*args, **kwargs))

    module.get_ppo_ray_runtime_env = get_ppo_ray_runtime_env  # type: ignore[attr-defined]


def _trainer(class_name: str) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        from rlprobe.frameworks.verl import driver

        wrap_family(
            getattr(module, class_name),
            {"__init__": driver.around_trainer_init, "fit": driver.around_fit},
            framework="verl",
        )

    return patch


def _queued_trainer(module: ModuleType) -> None:
    from rlprobe.frameworks.verl.replay import generation

    _trainer("PPOTrainer")(module)
    wrap_family(module.PPOTrainer, {"step": generation.around_step}, framework="verl")


def _steps(module: ModuleType) -> None:
    original = module.SkipManager.set_step.__func__

    @functools.wraps(original)
    def set_step(cls: type, step: int) -> Any:
        from rlprobe.frameworks.verl import driver

        driver.on_step(int(step))
        return original(cls, step)

    module.SkipManager.set_step = classmethod(set_step)


def _tracking(module: ModuleType) -> None:
    from rlprobe.frameworks.verl import driver

    wrap_family(module.Tracking, {"log": driver.around_log}, framework="verl")


def _agent_loop(module: ModuleType) -> None:
    from rlprobe.frameworks.verl.replay import generation

    wrap_family(
        module.AgentLoopManager,
        {
            "generate_sequences": generation.around_generate,
            "_init_agent_loop_workers": generation.around_init_workers,
        },
        framework="verl",
    )


def _replicas(module: ModuleType) -> None:
    from rlprobe.frameworks.verl.engine import engines

    engines.register_replicas(module)


def _rollouts(module: ModuleType) -> None:
    from rlprobe.frameworks.verl.engine import engines

    engines.register_adapters(module)


def _server(class_name: str) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        from rlprobe.frameworks.verl.engine import servers

        servers.patch(module, class_name)

    return patch


def _dtypes(module: ModuleType) -> None:
    from rlprobe.frameworks.verl import wide

    wide.teach(module)


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "verl.workers.engine_workers": _workers,
    "verl.utils.torch_dtypes": _dtypes,
    "verl.trainer.constants_ppo": _runtime_env,
    "verl.trainer.ppo.ray_trainer": _trainer("RayPPOTrainer"),
    "verl.trainer.ppo.v1.trainer_base": _queued_trainer,
    "verl.utils.skip.skip_manager": _steps,
    "verl.utils.tracking": _tracking,
    "verl.experimental.agent_loop.agent_loop": _agent_loop,
    "verl.workers.rollout.replica": _replicas,
    "verl.workers.rollout.base": _rollouts,
}

#: Imported only where such an engine is used, and hooked only for its inference layers.
_SERVERS: dict[str, Callable[[ModuleType], None]] = {
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _server("vLLMHttpServer"),
    "verl.workers.rollout.sglang_rollout.async_sglang_server": _server("SGLangHttpServer"),
}
