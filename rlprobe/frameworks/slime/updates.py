"""What an update does inside ``train``: losses per micro-batch, gradients before the step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlprobe.capture import megatron_grads, megatron_layout
from rlprobe.frameworks.slime import running
from rlprobe.frameworks.stepping import stepping


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

    Of Megatron's they are what each rank steps: copies, or the stretches that are its own of a
    distributed optimizer. Of any other on several data-parallel ranks a rank may hold the sums of
    its own shard only: the gradients are left out there rather than recorded wrong.
    """
    scope = running.scope()
    if optimizer is None or scope is None:
        yield
    elif megatron_grads.is_megatron(optimizer):

        def prepared() -> None:
            scope.gradients("grad_reduced", optimizer)
            scope.gradient_norms(optimizer)

        def ready() -> None:
            scope.gradients("grad_clipped", optimizer)
            scope.settings(optimizer)

        def stepped(result: Any) -> None:
            # whether it stepped, the norm that it clips by, how many gradients are 0
            scope.total_norm(result[1] if isinstance(result, tuple) else None)

        with stepping(optimizer, prepared, ready), _wrapped(optimizer, stepped):
            yield
    elif megatron_layout.data_parallel_size() > 1:
        yield
    else:
        with _reporting(optimizer):
            yield


def _reporting(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Each parameter's gradient as it is when ``step`` is called."""

    def begins() -> None:
        scope = running.scope()
        if scope is not None:
            scope.gradients("grad_reduced")
            scope.settings(optimizer)

    return _wrapped(optimizer, lambda _: None, begins)


@contextlib.contextmanager
def _wrapped(
    optimizer: Any, ended: Callable[[Any], None], begins: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Each call of an optimizer's ``step`` is seen before, and after with what it returns."""
    call = optimizer.step
    own = vars(optimizer).get("step")

    @functools.wraps(call)
    def step(*args: Any, **kwargs: Any) -> Any:
        begins()
        result = call(*args, **kwargs)
        ended(result)
        return result

    optimizer.step = step
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own
