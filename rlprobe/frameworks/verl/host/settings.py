"""What an alignment itself asks of verl, in the words of the version that will run.

Hydra refuses a key that a version does not have yet, or has elsewhere. Only rlprobe's own overrides
pass through here; the user's are the user's (:mod:`.keys` checks them).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlprobe.frameworks.verl import versions

#: Key -> the first version that has it. What it asks for is what earlier versions do anyway (there
#: is one trainer), or cannot do (a seed of the engine's): their rollouts are recorded as ever.
_SINCE = {
    "trainer.use_v1": "0.9.0",
    "actor_rollout_ref.rollout.seed": "0.9.0",
    "actor_rollout_ref.rollout.full_determinism": "0.9.0",
}
#: Section -> the first version that calls it so, and what it was called before.
_MOVED = {"critic.fsdp": ("0.8.0", "critic.model.fsdp_config")}


def of_version(overrides: Sequence[str], version: str) -> list[str]:
    """rlprobe's own overrides as a version of verl knows them; what it lacks is left out."""
    found = []
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in _SINCE and versions.older(version, _SINCE[key]):
            continue
        found.append(_moved(override, key, version))
    return found


def _moved(override: str, key: str, version: str) -> str:
    for section, (since, before) in _MOVED.items():
        if key.startswith(f"{section}.") and versions.older(version, since):
            return override.replace(section, before, 1)
    return override
