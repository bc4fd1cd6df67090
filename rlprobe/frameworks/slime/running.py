"""What a training actor is doing: the rollout it trains on, and the stage under way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlprobe.capture.recorder import StageScope


@dataclass
class Running:
    """One rollout in one actor."""

    actor: Any
    #: actor or critic.
    role: str
    rollout_id: int
    #: This rank's share of the rollout; slime adds to it as the step goes on.
    rollout_data: dict[str, Any]
    #: Canonical names of the stages that ran.
    done: set[str] = field(default_factory=set)
    #: The stage under way; stages never nest.
    scope: StageScope | None = None
    #: slime's iterator over micro-batches, once a stage has been given it.
    iterator: Any = None


_now: Running | None = None


def now() -> Running | None:
    """The rollout under way, or None between rollouts."""
    return _now


def begin(running: Running) -> None:
    """A rollout begins."""
    global _now
    _now = running


def end() -> None:
    """The rollout is over, whatever came of it."""
    global _now
    _now = None


def scope() -> StageScope | None:
    """The stage under way if its layers are captured, else None."""
    found = _now.scope if _now is not None else None
    return found if found is not None and found.captured else None


def argument(original: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """An argument by name, wherever the call and this version's signature put it."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


def rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Number of training processes of this role."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
