"""Change something for the time of a stage and put it back: what most faults do.

::

    with swapped(torch.nn.functional, "silu", wrong_silu):
        yield
"""

from __future__ import annotations

import contextlib
import functools
import inspect
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
    undo = _undo(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        undo()


def _undo(owner: Any, name: str) -> Callable[[], None]:
    """What puts ``owner.name`` back as it is now, however it comes to be there."""
    own = getattr(owner, "__dict__", {})
    # a class finds its names in itself and its bases, an instance also in its class
    kind = owner if isinstance(owner, type) else type(owner)
    # A property (any data descriptor) of an instance stores where it likes: only setting it
    # again undoes it.
    described = kind is not owner and inspect.isdatadescriptor(
        inspect.getattr_static(kind, name, None)
    )
    if name in own and not described:
        # not what getattr gives: of a class that would be a static method's bare function
        return functools.partial(setattr, owner, name, own[name])
    if hasattr(kind, name) and not described:
        # what the class gives comes back when what hides it is removed
        return functools.partial(delattr, owner, name)
    return functools.partial(setattr, owner, name, getattr(owner, name))


@contextlib.contextmanager
def output_of(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``module`` return ``change(output)`` (of its first output, where it has several).

    In its forward and not in a hook: whether a recorder's hooks see what other hooks make of an
    output depends on the recorder.
    """
    right = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = right(*args, **kwargs)
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    with swapped(module, "forward", forward):
        yield


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


@contextlib.contextmanager
def linear_in_halves() -> Iterator[None]:
    """Linear layers sum two halves of their width apart, as tensor parallelism does."""
    import torch

    right = torch.nn.functional.linear

    def halves(x: Any, weight: Any, bias: Any = None) -> Any:
        half = x.shape[-1] // 2
        summed = right(x[..., :half], weight[:, :half]) + right(x[..., half:], weight[:, half:])
        return summed if bias is None else summed + bias

    with swapped(torch.nn.functional, "linear", halves):
        yield
