"""Which of slime's functions are wrapped, registered for the moment slime is imported.

Nothing here imports slime. Before a function is wrapped, it must exist and take the arguments that
are read from it by name; what else it takes passes through. A version in which one is missing is
refused when its module is imported, before anything trains.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlprobe.errors import HookError
from rlprobe.frameworks.imports import when_imported
from rlprobe.frameworks.slime import control, prompts_only, versions
from rlprobe.frameworks.wrap import plain_class, wrap_family, wrap_method

ACTOR = "slime.backends.megatron_utils.actor"
MODEL = "slime.backends.megatron_utils.model"
ARGUMENTS = "slime.backends.megatron_utils.arguments"
ROLLOUT = "slime.ray.rollout"
GENERATION = "slime.rollout.sglang_rollout"
LOGGING = ("slime.utils.logging_utils", "slime.observability.logging_utils")
ENGINE = "sglang.srt.model_executor.model_runner"

#: Class or function, by module, and the arguments read from it by name.
REQUIRED: dict[str, dict[str, tuple[str, ...]]] = {
    ACTOR: {
        "MegatronTrainRayActor.init": ("args", "role"),
        "MegatronTrainRayActor.train_actor": ("rollout_id", "rollout_data"),
        "MegatronTrainRayActor.train_critic": ("rollout_id", "rollout_data"),
        "MegatronTrainRayActor.compute_log_prob": ("store_prefix",),
        "train": ("model", "optimizer", "data_iterator"),
        "forward_only": ("model",),
    },
    MODEL: {"loss_function": ()},
    ROLLOUT: {
        "RolloutManager.generate": ("rollout_id",),
        "RolloutManager._get_rollout_data": ("rollout_id",),
        "RolloutManager.dispose": (),
    },
}

#: Makes and loads a model before slime keeps copies of its weights (v0.1.0 to main).
_BUILD = "initialize_model_and_optimizer"

_warned = False


def register() -> None:
    """Register every hook point of v0.2.2 to v0.3.1 and main."""
    if control.session() is not None:
        for module, patch in {
            ACTOR: _actor, MODEL: _model, ROLLOUT: _rollout, ARGUMENTS: _arguments
        }.items():  # fmt: skip
            when_imported(module, functools.partial(_checked, patch))
        for module in LOGGING:
            when_imported(module, _logging)
        when_imported(ENGINE, _engine)
    when_imported(GENERATION, prompts_only.patch_generation)
    when_imported(ROLLOUT, prompts_only.patch_manager)


def check(module: str, found: dict[str, Callable[..., Any] | None], version: str) -> None:
    """Refuse a version whose functions are not as they are read.

    Args:
        module: the module's name in :data:`REQUIRED`.
        found: its functions by name, None where one does not exist.
        version: for the message.

    Raises:
        HookError: names the version, every hook point that does not fit, and what it lacks.
    """
    problems = []
    for name, arguments in REQUIRED[module].items():
        function = found.get(name)
        if function is None:
            problems.append(f"{name} does not exist")
            continue
        try:
            signature = inspect.signature(function)
        except ValueError:
            problems.append(f"{name} has no signature")
            continue
        absent = [argument for argument in arguments if argument not in signature.parameters]
        if absent:
            problems.append(f"{name}{signature} has no argument {', '.join(absent)}")
    if problems:
        raise HookError(
            f"slime {version}: hook points in {module} are not as expected: {'; '.join(problems)}. "
            f"rlprobe captures slime {', '.join(versions.KNOWN)}"
        )


def _checked(patch: Callable[[ModuleType], None], module: ModuleType) -> None:
    global _warned
    version = versions.installed()
    if not versions.is_known(version) and not _warned:
        _warned = True
        sys.stderr.write(
            f"rlprobe: slime {version} is not among the versions its hooks were checked against "
            f"({', '.join(versions.KNOWN)}); its hook points are checked now\n"
        )
    if module.__name__ in REQUIRED:
        names = REQUIRED[module.__name__]
        check(module.__name__, {name: _find(module, name) for name in names}, version)
    patch(module)


def _find(module: ModuleType, name: str) -> Callable[..., Any] | None:
    owner_name, _, method = name.rpartition(".")
    if not owner_name:
        return getattr(module, name, None)
    owner = getattr(module, owner_name, None)
    return None if owner is None else getattr(plain_class(owner), method, None)


def wrap_function(
    module: ModuleType,
    name: str,
    around: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> None:
    """Replace a module's function: ``around(original, args, kwargs)`` is called instead."""
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, args, kwargs)

    setattr(module, name, wrapper)


def _actor(module: ModuleType) -> None:
    from rlprobe.frameworks.slime import workers

    wrap_family(
        module.MegatronTrainRayActor,
        {
            "init": workers.around_init,
            "train_actor": workers.around_train_actor,
            "train_critic": workers.around_train_critic,
            "compute_log_prob": workers.around_compute_log_prob,
        },
        framework="slime",
    )
    wrap_function(module, "train", workers.train)
    wrap_function(module, "forward_only", workers.forward_only)
    session = control.session()
    if session is not None and session.perturbed:
        if not hasattr(module, _BUILD):
            raise HookError(
                f"slime {versions.installed()}: {module.__name__} has no {_BUILD}, so the weights "
                "of a perturbed control cannot be disturbed; take controls.perturbed out"
            )
        wrap_function(module, _BUILD, workers.build)


def _model(module: ModuleType) -> None:
    from rlprobe.frameworks.slime import updates

    wrap_function(module, "loss_function", updates.loss_function)


def _arguments(module: ModuleType) -> None:
    from rlprobe.frameworks.slime import precision

    # from v0.3 on slime calls the second; the first is another name of it
    known = ("set_default_megatron_args", "_set_default_megatron_args")
    for name in known:
        if hasattr(module, name):
            wrap_function(module, name, precision.set_defaults)


def _rollout(module: ModuleType) -> None:
    from rlprobe.frameworks.slime import manager

    # a Ray actor class since its module was imported: what it makes of the class is wrapped, and
    # reaches the actor's process with it
    cls = plain_class(module.RolloutManager)
    wrap_method(cls, "generate", manager.around_generate)
    wrap_method(cls, "_get_rollout_data", manager.around_get_rollout_data)
    wrap_method(cls, "dispose", manager.around_dispose)


def _logging(module: ModuleType) -> None:
    from rlprobe.frameworks.slime import metrics

    wrap_function(module, "log", metrics.log)


def _engine(module: ModuleType) -> None:
    from rlprobe.frameworks.slime import sglang

    sglang.patch(module)
