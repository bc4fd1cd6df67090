"""What a Megatron optimizer steps with, seen inside one call of its ``step``; in any framework."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

Seen = Callable[[], None]


@contextlib.contextmanager
def stepping(optimizer: Any, prepared: Seen, ready: Seen) -> Iterator[None]:
    """Watch an optimizer while the body lets it step.

    ``step`` prepares the gradients (copies them to the main parameters, takes the loss scale out),
    takes their norm, clips them and steps with them.

    Args:
        optimizer: Megatron's (:func:`rlprobe.capture.megatron_grads.is_megatron`).
        prepared: called once gradients are prepared.
        ready: called once they are clipped.
    """
    names = {"prepare_grads": (_after, prepared), "step_with_ready_grads": (_before, ready)}
    # the optimizer may carry a wrapper of somebody else's on the instance
    own = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
    for name, (around, seen) in names.items():
        setattr(optimizer, name, around(getattr(optimizer, name), seen))
    try:
        yield
    finally:
        for name in names:
            delattr(optimizer, name)
        for name, value in own.items():
            setattr(optimizer, name, value)


def _after(call: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        seen()
        return result

    return wrapper


def _before(call: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        seen()
        return call(*args, **kwargs)

    return wrapper
