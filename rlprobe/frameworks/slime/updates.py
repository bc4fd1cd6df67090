"""What an update does inside ``train``: losses per micro-batch, gradients before the step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlprobe.capture import megatron_layout
from rlprobe.frameworks.slime import running


def loss_function(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A micro-batch's loss and the parts that slime reports of it."""
    result = original(*args, **kwargs)
    scope = running.scope()
    if scope is not None:
        scope.loss("loss", result[0])
        report = result[2] if len(result) > 2 else {}
        values = report.get("values")
        # the first value counts samples or tokens, the others belong to the keys
        if isinstance(values, torch.Tensor):
            for name, value in zip(report.get("keys", ()), values.detach()[1:], strict=False):
                scope.loss(str(name), value)
    return result


@contextlib.contextmanager
def watched(optimizer: Any) -> Iterator[None]:
    """See the gradients as this optimizer does, before and after clipping.

    With a distributed optimizer on several ranks, a rank holds the sums of its own shard only: the
    gradients are left out there rather than recorded wrong.
    """
    if optimizer is None or running.scope() is None or megatron_layout.data_parallel_size() > 1:
        yield
        return
    wrapped = {"step": "grad_reduced"}
    # with half-precision parameters, clipping changes fp32 copies and not what the modules hold
    if hasattr(optimizer, "step_with_ready_grads") and not _keeps_copies(optimizer):
        wrapped["step_with_ready_grads"] = "grad_clipped"
    # the optimizer may carry a wrapper of somebody else's on the instance
    own = {name: vars(optimizer)[name] for name in wrapped if name in vars(optimizer)}
    for name, kind in wrapped.items():
        setattr(optimizer, name, _reporting(getattr(optimizer, name), kind))
    try:
        yield
    finally:
        for name in wrapped:
            delattr(optimizer, name)
        for name, value in own.items():
            setattr(optimizer, name, value)


def _reporting(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        scope = running.scope()
        if scope is not None:
            scope.gradients(kind)
        return call(*args, **kwargs)

    return wrapper


def _keeps_copies(optimizer: Any) -> bool:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(type(part).__name__ != "FP32Optimizer" for part in parts)
