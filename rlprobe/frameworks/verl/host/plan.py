"""Which stages a verl configuration runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlprobe import stages
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError


def stages_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Canonical stages that verl's resolved configuration runs, generation included.

    Follows verl's ``need_reference_policy`` and ``need_critic`` (``verl/trainer/ppo/utils.py``):
    a reference policy for either KL term, a critic where it is enabled explicitly or the advantage
    estimator is GAE.
    """
    actor = section(config, "actor_rollout_ref", "actor")
    algorithm = section(config, "algorithm")
    found = [stages.GENERATE]
    if algorithm.get("use_kl_in_reward") or actor.get("use_kl_loss"):
        found.append(stages.REFERENCE)
    correction = algorithm.get("rollout_correction") or {}
    if not correction.get("bypass_mode"):
        found.append(stages.LOG_PROB)
    enabled = section(config, "critic").get("enable")
    if enabled if enabled is not None else algorithm.get("adv_estimator", "gae") == "gae":
        found += [stages.VALUES, stages.CRITIC_UPDATE]
    found.append(stages.ACTOR_UPDATE)
    return tuple(sorted(found, key=stages.order))


def section(config: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """A part of a nested configuration; empty where there is none."""
    for key in path:
        config = config.get(key) or {}
    return config


def from_overrides(overrides: list[str]) -> dict[str, Any]:
    """The nested mapping that Hydra overrides of the form ``a.b=value`` describe.

    Enough of Hydra's grammar to tell which stages run; verl itself parses them for real.

    Raises:
        ConfigError: an override neither sets a key nor deletes one.
    """
    from rlprobe.documents import yamlfile

    root: dict[str, Any] = {}
    for override in overrides:
        if override.startswith("~"):
            continue
        key, separator, text = override.lstrip("+").partition("=")
        if not separator or not key:
            raise ConfigError(
                f"override {override!r} is not of the form KEY=VALUE (or +KEY=VALUE, ~KEY)"
            )
        *parents, leaf = key.split(".")
        node = root
        for parent in parents:
            child = node.get(parent)
            if not isinstance(child, dict):
                child = node[parent] = {}
            node = child
        try:
            node[leaf] = yamlfile.parse(text)
        except DocumentError:
            node[leaf] = text
    return root
