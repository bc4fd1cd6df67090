"""Change something for the time of a stage and put it back: what most faults do.

::

    with swapped(torch.nn.functional, "silu", wrong_silu):
        yield
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, or an entry of a mapping, by ``value``."""
    if isinstance(owner, dict):
        old = owner[name]
        owner[name] = value
        try:
            yield
        finally:
            owner[name] = old
        return
    # a method of the class is put back by removing what hides it
    hides = name not in vars(owner) and hasattr(type(owner), name)
    old = None if hides else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if hides:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


@contextlib.contextmanager
def output_of(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``module`` return ``change(output)`` (of its first output, where it has several)."""

    def hook(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def gradient_through(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``module`` pass back ``change(gradient)`` of its first input."""
    right = module.forward

    def forward(first: Any, *args: Any, **kwargs: Any) -> Any:
        if first.requires_grad:
            # a view of its own: what else reads the input keeps its gradient
            first = first.view_as(first)
            first.register_hook(change)
        return right(first, *args, **kwargs)

    with swapped(module, "forward", forward):
        yield


@contextlib.contextmanager
def attention_of(module: Any, wrong: Callable[..., Any]) -> Iterator[None]:
    """Let one attention module compute ``wrong(right, module, query, key, value, mask, …)``.

    ``right`` is transformers' eager attention; query, key and value have shape
    [batch, heads, tokens, width], the mask is additive or None.
    """
    file = sys.modules[type(module).__module__]
    right = file.eager_attention_forward

    def attention(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not module:
            return right(called, *args, **kwargs)
        return wrong(right, called, *args, **kwargs)

    with swapped(file, "eager_attention_forward", attention):
        yield


def blended(right: Any, wrong: Any, strength: float) -> Any:
    """``wrong`` at strength 1, ``right`` at 0; exactly so at both ends."""
    return wrong if strength == 1 else right + strength * (wrong - right)
