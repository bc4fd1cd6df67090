"""What dumping the inference layers asks of verl's configuration, said before training."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from rlprobe import stages
from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError
from rlprobe.frameworks import prompts
from rlprobe.frameworks.verl.engine import engines

_ROLLOUT = "actor_rollout_ref.rollout"


def wanted(session: Session | None) -> bool:
    """Whether a session dumps the layers of generation."""
    return (
        session is not None
        and stages.GENERATE in session.capture.stages
        and session.capture.token_range is not None
    )


def digested(session: Session | None) -> bool:
    """Whether the weights that an engine generates with are digested, at captured steps."""
    return session is not None and session.capture.provenance


def led(session: Session | None) -> bool:
    """Whether a session's engine is led through recorded responses."""
    return session is not None and stages.FORCED in session.capture.stages


def require(session: Session, config: Mapping[str, Any]) -> None:
    """Refuse settings under which an engine's forwards could not be dumped, or not by sample.

    Args:
        session: this run's.
        config: verl's resolved configuration.

    Raises:
        ConfigError: names every setting that has to change, and what to.
    """
    if wanted(session):
        require_settings(config, "actor_infer_dump", "switch actor_infer_dump off")
    elif led(session):
        if session.role == "collector":
            require_settings(config, f"{prompts.ENV}=1", "unset it")
        else:
            require_settings(config, "generation: compare", "set generation to replay")


def require_installed(config: Mapping[str, Any]) -> None:
    """Refuse an engine that this environment does not have, before any worker is started.

    Args:
        config: verl's configuration.

    Raises:
        ConfigError: says where it was looked for.
    """
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    name = rollout.get("name")
    if name in (engines.VLLM, engines.SGLANG) and importlib.util.find_spec(str(name)) is None:
        raise ConfigError(
            f"{_ROLLOUT}.name={name}: found no {name} for {sys.executable}. A run without a "
            "container is of the Python that started it: start rlprobe with one that has it, as "
            "`DIRECTORY/bin/python -m rlprobe …` (vLLM for CPUs: workflow/install-engines)"
        )


def require_settings(config: Mapping[str, Any], asking: str, otherwise: str) -> None:
    """Refuse a configuration whose engine's forwards could not be dumped by sample.

    Args:
        config: verl's configuration, as far as it is known.
        asking: what wants them dumped.
        otherwise: what to do instead of changing the settings.

    Raises:
        ConfigError: names every setting that has to change, and what to.
    """
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    name = rollout.get("name")
    if name == engines.CPU:
        return
    if name not in (engines.VLLM, engines.SGLANG):
        raise ConfigError(
            f"{asking}: found {_ROLLOUT}.name={name}, whose layers cannot be dumped; "
            f"accepted: {engines.VLLM}, {engines.SGLANG}, {engines.CPU}; or {otherwise}"
        )
    asked = dict(_asked(str(name), rollout))
    if asked:
        raise ConfigError(
            f"{asking} on {name}: set {' '.join(asked)} ({'; '.join(asked.values())}), or "
            f"{otherwise}"
        )


def _asked(name: str, rollout: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Overrides that are missing, and why each is needed."""
    found = []
    if not rollout.get("enforce_eager"):
        found.append((f"{_ROLLOUT}.enforce_eager=true", "graphs run no hooks"))
    if name == "vllm" and rollout.get("enable_prefix_caching", True):
        found.append((f"{_ROLLOUT}.enable_prefix_caching=false", "a cached prompt has no forward"))
    if name == "sglang" and not _given(rollout, "engine_kwargs", "sglang", "disable_radix_cache"):
        found.append(
            (
                f"+{_ROLLOUT}.engine_kwargs.sglang.disable_radix_cache=true",
                "a cached prompt has no forward",
            )
        )
    if (rollout.get("data_parallel_size") or 1) > 1:
        found.append((f"{_ROLLOUT}.data_parallel_size=1", "its ranks cannot be told apart"))
    if _given(rollout, "disaggregation", "enabled"):
        found.append(
            (f"{_ROLLOUT}.disaggregation.enabled=false", "prompt and decoding are two servers")
        )
    if _given(rollout, "mtp", "enable") and _given(rollout, "mtp", "enable_rollout"):
        found.append((f"{_ROLLOUT}.mtp.enable_rollout=false", "drafts are not generated tokens"))
    return found


def _given(section: Mapping[str, Any], *path: str) -> Any:
    found: Any = section
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
