"""What a training actor is doing: the rollout it trains on, and the stage under way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from rlprobe.capture.recorder import StageScope
from rlprobe.errors import HookError


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
    """An argument by name, wherever the call and this version's signature put it.

    A subclass of the user's own may pass everything on (``*args, **kwargs``): the method that it
    overrides says then what is what.

    Raises:
        HookError: neither says it; names the function and the argument.
    """
    for function in (original, *_overridden(original, args)):
        signature = inspect.signature(function)
        if not _names(signature, name):
            continue
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise HookError(f"slime: {_called(original)}: {error}") from error
        bound.apply_defaults()
        return bound.arguments[name]
    raise HookError(
        f"slime: {_called(original)} is called in a way that does not say what its {name!r} is: "
        f"give the method a parameter of that name, or call slime's own"
    )


def _names(signature: inspect.Signature, name: str) -> bool:
    """Whether a signature has a parameter of that name which is one value."""
    found = signature.parameters.get(name)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return found is not None and found.kind not in several


def _overridden(original: Callable[..., Any], args: Any) -> list[Callable[..., Any]]:
    """Methods of the same name further up, where the first argument is an object that has them."""
    called = getattr(original, "__name__", "")
    above = type(args[0]).__mro__ if args else ()
    found = (vars(cls).get(called) for cls in above)
    return [inspect.unwrap(method) for method in found if inspect.isfunction(method)]


def _called(original: Callable[..., Any]) -> str:
    return str(getattr(original, "__qualname__", original))


def rank() -> int:
    """This process's rank; 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """Number of training processes of this role."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
