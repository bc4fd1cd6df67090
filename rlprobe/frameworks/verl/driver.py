"""The driver's side: session and steps to the workers, metrics, and the check at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlprobe.capture.session import ENV, Session
from rlprobe.errors import HookError
from rlprobe.frameworks import forward, plain, prompts, proof, switch
from rlprobe.frameworks.verl import control, installed, versions
from rlprobe.frameworks.verl.control import DRIVER_DIRECTORY
from rlprobe.frameworks.verl.engine import inference
from rlprobe.frameworks.verl.host import plan

_FIELD = "ascend_precision_collector"


def with_variables(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Let Ray's workers know where the command was started, and what is asked of them.

    Those of a cluster that was there before inherit nothing of the driver's.
    """
    directory = os.environ.get(DRIVER_DIRECTORY)
    if directory:
        runtime_env.setdefault("env_vars", {}).setdefault(DRIVER_DIRECTORY, directory)
    return forward.added_to(runtime_env)


def around_trainer_init(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Resolve the session from the trainer's configuration before any worker exists."""
    config = kwargs.get("config", args[0] if args else None)
    session = control.session()
    if session is None:
        session = _collector_session(config)
        if session is not None:
            proof.forget(session)
        if prompts.wanted(os.environ):  # it needs torch and verl
            from rlprobe.frameworks.verl.replay import prompts_only

            session = prompts_only.prepare(session, config)
        control.set_session(session)
    if session is not None:
        proof.require_version(session, installed.version())
        _require_hooks(config)
        _require_inference(session, config)
        _write_configuration(session, config)
    return original(self, *args, **kwargs)


def _require_hooks(config: Any) -> None:
    from omegaconf import OmegaConf

    version = installed.require_version()
    versions.require_engine_workers(version, OmegaConf.to_container(config, resolve=False))


def _require_inference(session: Session, config: Any) -> None:
    from omegaconf import OmegaConf

    resolved = OmegaConf.to_container(config, resolve=True)
    inference.require_installed(resolved)
    if inference.wanted(session) or inference.led(session):
        inference.require(session, resolved)


def _collector_session(config: Any) -> Session | None:
    from omegaconf import OmegaConf

    from rlprobe.capture import collector

    path = OmegaConf.select(config, _FIELD, default=None) if config is not None else None
    if path is None or str(path) in ("", "None", "null"):
        # the collector's YAML may also be switched on without touching the command line
        path = os.environ.get(ENV)
    if not path:
        return None
    directory = Path(os.environ.get(DRIVER_DIRECTORY) or Path.cwd())
    file = directory / Path(str(path)).expanduser()
    available = plan.stages_of(OmegaConf.to_container(config, resolve=True))
    device = str(OmegaConf.select(config, "trainer.device", default="cpu"))
    found = switch.read(file)
    if found.directory is not None:
        return plain.session(found.directory, "verl", available, device=device, expected=available)
    session: Session | None = collector.load(
        file, directory=directory, framework="verl", available=available, device=device
    )
    return session


def _write_configuration(session: Session, config: Any) -> None:
    if not session.capture.configurations:
        return
    from omegaconf import OmegaConf

    from rlprobe.capture import configurations

    configurations.write(session, OmegaConf.to_container(config, resolve=True))


def on_step(trainer_step: int) -> None:
    """A new step begins."""
    if control.session() is not None:
        control.publish_step(trainer_step)


def on_generation(prompts: Any) -> None:
    """Before 0.9 nothing announces the step but the batch that is to be generated.

    Raises:
        HookError: this verl says it nowhere.
    """
    if versions.SKIP_MANAGER in sys.modules:
        return
    trainer_step = prompts.meta_info.get("global_steps")
    if trainer_step is None:
        raise HookError(
            "this verl neither has SkipManager.set_step nor puts global_steps into the batch to "
            "be generated, so the step is not known"
        )
    control.publish_step(int(trainer_step))


def around_log(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Append the trainer's metrics of a step to ``metrics.jsonl``."""
    session = control.session()
    data = kwargs.get("data", args[0] if args else None)
    trainer_step = kwargs.get("step", args[1] if len(args) > 1 else None)
    if session is not None and isinstance(data, dict) and trainer_step is not None:
        _append_metrics(session, data, int(trainer_step))
    return original(self, *args, **kwargs)


def _append_metrics(session: Session, data: dict[str, Any], trainer_step: int) -> None:
    metrics: dict[str, float] = {}
    for name, value in data.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            continue  # trackers also take tables and text; a metric is a number
    step = trainer_step - control.first_step()
    side = Path(session.side)
    side.mkdir(parents=True, exist_ok=True)
    with (side / "metrics.jsonl").open("a", encoding="utf-8") as file:
        line = {"step": step, "trainer_step": trainer_step, "metrics": metrics}
        file.write(json.dumps(line, sort_keys=True) + "\n")


def around_fit(
    original: Callable[..., Any], self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the training loop, then prove that every expected stage was captured.

    Raises:
        HookError: an expected stage left no record.
    """
    result = original(self, *args, **kwargs)
    session = control.session()
    if session is not None:
        proof.require_captured(session)
    return result
