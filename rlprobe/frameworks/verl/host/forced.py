"""Which of verl's engines can be led through recorded responses (``generation: compare``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlprobe.errors import ConfigError
from rlprobe.frameworks.verl.engine import engines

if TYPE_CHECKING:
    from rlprobe.capture.session import CaptureOptions
    from rlprobe.config import CaptureSection

#: SGLang's sampler has no place where a token can be chosen for it that was tried.
ENGINES = (engines.CPU, engines.VLLM)


def check(
    config: Mapping[str, Any],
    capture: CaptureSection | CaptureOptions,
    asking: str = "generation: compare",
    otherwise: str = "generation: replay",
) -> None:
    """Refuse what an engine could not be led through.

    Args:
        config: verl's configuration, as far as it is known.
        capture: what is recorded.
        asking: what wants it led.
        otherwise: what to do instead of changing anything else.

    Raises:
        ConfigError: another engine, or a trainer that asks for rollouts in another way.
    """
    section = config.get("actor_rollout_ref") or {}
    name = (section.get("rollout") or {}).get("name")
    if name not in ENGINES:
        raise ConfigError(
            f"{asking}: found actor_rollout_ref.rollout.name={name}, which cannot be "
            f"led through recorded responses; accepted: {', '.join(ENGINES)}, or {otherwise}"
        )
    if (config.get("trainer") or {}).get("use_v1"):
        raise ConfigError(
            f"{asking}: found trainer.use_v1=true, whose trainer keeps its rollouts in "
            f"a queue; set trainer.use_v1=false, or {otherwise}"
        )
    if capture.ranks and 0 not in capture.ranks:
        raise ConfigError(
            f"{asking}: found capture.ranks: {list(capture.ranks)}, but the engine that "
            f"is led through the responses is recorded as rank 0; add 0, or {otherwise}"
        )
    if not capture.key_data:
        raise ConfigError(
            f"{asking}: found capture.key_data: false, without which no log-prob is "
            f"kept; accepted: true, or {otherwise}"
        )


def computes(engine: str, precision: str) -> bool:
    """Whether an engine runs at a precision: vLLM has no double precision."""
    return engine == engines.CPU or precision != "fp64"
