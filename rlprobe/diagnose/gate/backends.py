"""Settings of two back ends of one trainer, said in one way.

verl's FSDP and Megatron back ends have sections of their own, and the optimizer's settings have
other names in each. What they have in common is compared as one setting; what one back end alone
has cannot be held against anything, and is said to be its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_STRATEGY = "actor_rollout_ref.actor.strategy"
_MEGATRON = "megatron"
#: Names of optimizers that compute the same.
_OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "sgd": "sgd"}
#: FSDP's name of a setting -> Megatron's, below a model's section.
_NAMES = {
    "grad_clip": "optim.clip_grad",
    "optim.lr_scheduler_type": "optim.lr_decay_style",
}
_MODELS = re.compile(r"^(actor_rollout_ref\.(?:actor|ref)|critic)\.")


def unlike(benchmark: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Whether one side trains with Megatron and the other does not."""
    found = [str(side.get(_STRATEGY, "")).lower() for side in (benchmark, target)]
    return all(found) and (found[0] == _MEGATRON) != (found[1] == _MEGATRON)


def in_one_way(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names that both back ends can be compared by.

    Args:
        settings: a run's configuration by dotted key.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        model = _MODELS.match(key)
        if model is None:
            found[key] = value
            continue
        rest = key[model.end() :]
        if rest == "optim.min_lr_ratio":  # FSDP has a share, Megatron a rate
            rate = settings.get(f"{model[0]}optim.lr")
            found[f"{model[0]}optim.min_lr"] = _product(value, rate)
        elif rest == "optim.optimizer":
            found[key] = _OPTIMIZERS.get(str(value).lower(), value)
        else:
            # FSDP has the clipping norm twice, of which the optimizer's own is used
            found.setdefault(f"{model[0]}{_NAMES.get(rest, rest)}", value)
    return found


def _product(share: Any, rate: Any) -> Any:
    numbers = (int, float)
    if isinstance(share, numbers) and isinstance(rate, numbers):
        return float(share) * float(rate)
    return 0.0 if share is None else share


def is_of_one(key: str, benchmark: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Whether one back end alone has a setting of a model's section."""
    return _MODELS.match(key) is not None and (key in benchmark) != (key in target)
