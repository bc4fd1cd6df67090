"""Change something for the time of a stage and put it back: what most faults do.

::

    with swapped(torch.nn.functional, "silu", wrong_silu):
        yield
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute (or an entry of a mapping) by ``value``; yields the old one."""
    if isinstance(owner, dict):
        old = owner[name]
        owner[name] = value
    else:
        old = getattr(owner, name)
        setattr(owner, name, value)
    try:
        yield old
    finally:
        if isinstance(owner, dict):
            owner[name] = old
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
def input_of(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``module`` work on ``change(input)`` of its first positional input."""

    def hook(_: Any, inputs: Any) -> Any:
        return (change(inputs[0]), *inputs[1:])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
