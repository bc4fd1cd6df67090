"""verl's Megatron engine: its micro-batches come out of an iterator, its losses out of a callback.

Megatron's schedule calls ``forward_step`` once a micro-batch and model chunk; each call takes the
micro-batch from its own iterator. Only the last pipeline stage calls the engine's
``postprocess_micro_batch_func``, which computes outputs and loss. Written against verl 0.7.1 to
0.9.1; 0.9.1 is run, on a CPU (see :mod:`.cpu.megatron`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any


def is_megatron(engine: Any) -> bool:
    """Whether this is verl's Megatron engine."""
    return any(cls.__name__ == "MegatronEngine" for cls in type(engine).__mro__)


def watch(
    engine: Any,
    begins: Callable[[int, Any, bool], None],
    ends: Callable[[int, Any, Any], None],
) -> None:
    """Wrap the engine's methods as instance attributes.

    Args:
        engine: a ``MegatronEngine``, initialised.
        begins: called with the micro-batch's number in this stage, its data and whether this is
            the first of this rank's chunks, each time a chunk is about to work on it.
        ends: called with the micro-batch's number, its loss and its output.
    """
    forward_step = engine.forward_step
    postprocess = engine.postprocess_micro_batch_func
    batch = engine.forward_backward_batch
    #: Micro-batches that each chunk, and at last the loss, has seen in this batch.
    seen: dict[int | str, int] = {}

    def number(who: int | str) -> int:
        seen[who] = seen.get(who, -1) + 1
        return seen[who]

    @functools.wraps(batch)
    def watched_batch(*args: Any, **kwargs: Any) -> Any:
        seen.clear()
        return batch(*args, **kwargs)

    @functools.wraps(forward_step)
    def watched_forward_step(batch_iter: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        micro_batch = next(batch_iter)
        chunk = _position(engine.module, model)
        begins(number(chunk), micro_batch, chunk == 0)
        # the engine takes the micro-batch itself, and whatever follows it stays in the iterator
        return forward_step(itertools.chain([micro_batch], batch_iter), model, *args, **kwargs)

    @functools.wraps(postprocess)
    def watched_postprocess(*args: Any, **kwargs: Any) -> Any:
        result = postprocess(*args, **kwargs)
        # (loss, output), or with a token count between them where Megatron averages over tokens
        ends(number("loss"), result[0], result[-1])
        return result

    engine.forward_backward_batch = watched_batch
    engine.forward_step = watched_forward_step
    engine.postprocess_micro_batch_func = watched_postprocess


def _position(chunks: Any, model: Any) -> int:
    """Which of this rank's chunks is at work; wrappers aside."""
    if not isinstance(chunks, (list, tuple)):
        return 0
    for index, chunk in enumerate(chunks):
        if model is chunk or _inside(chunk, model):
            return index
    return 0


def _inside(wrapper: Any, model: Any) -> bool:
    while (inner := getattr(wrapper, "module", None)) is not None:
        if inner is model:
            return True
        wrapper = inner
    return False
