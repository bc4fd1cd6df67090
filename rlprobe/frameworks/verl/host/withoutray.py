"""Runs whose trainer and workers do without Ray (``ray: false``): which can, and how they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlprobe.errors import ConfigError
from rlprobe.frameworks.verl.engine import engines

if TYPE_CHECKING:
    from rlprobe.spec import RunSpec

#: Takes the overrides that ``verl.trainer.main_ppo`` takes.
MODULE = "rlprobe.frameworks.verl.local.train"
#: Versions whose processes it stands in for; others keep their parts elsewhere.
VERSIONS = ("0.8.0", "0.9.0", "0.9.1")
#: Engines that it can ask in this process.
_ENGINES = (engines.CPU, engines.VLLM, engines.REPLAY)


def require(spec: RunSpec, config: Mapping[str, Any]) -> None:
    """Refuse what only Ray can give.

    Args:
        spec: a run with ``ray: false``.
        config: verl's configuration, as far as the host knows it.

    Raises:
        ConfigError: names the key that asks for it.
    """
    rollout = config["actor_rollout_ref"].get("rollout") or {}
    reward = (config.get("reward") or {}).get("reward_model") or {}
    wanted = {
        f"device {spec.device}": spec.device != "cpu",
        f"resources.nodes {spec.resources.nodes}": spec.resources.nodes > 1,
        "an entry_point of one's own": spec.entry_point is not None,
        f"verl {spec.framework_version} (known: {', '.join(VERSIONS)})": (
            spec.framework_version not in VERSIONS
        ),
        "trainer.use_v1": bool((config.get("trainer") or {}).get("use_v1")),
        "reward.reward_model.enable": bool(reward.get("enable")),
        "distillation.enabled": bool((config.get("distillation") or {}).get("enabled")),
        f"actor_rollout_ref.rollout.name={rollout.get('name')}": (
            rollout.get("name") not in _ENGINES
        ),
    }
    found = [what for what, given in wanted.items() if given]
    if found:
        raise ConfigError(
            f"ray: found false, but {spec.role} needs Ray for {', '.join(found)}; accepted: true"
        )
