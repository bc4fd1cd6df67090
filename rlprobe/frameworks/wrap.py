"""Wrap methods where they live, for a class and for every subclass that overrides them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlprobe.errors import HookError

_MARK = "_rlprobe_wrapped"

#: ``around(original, self, args, kwargs) -> result``
Around = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


def wrap_method(cls: type, name: str, around: Around) -> None:
    """Replace ``cls.name`` by a wrapper that keeps its attributes and signature.

    Only a method that ``cls`` itself defines is wrapped, and only once. The wrapper finds
    ``around`` by import when it runs: a class defined in ``__main__`` is pickled by value, and
    everything it closes over would travel with it.
    """
    original = cls.__dict__.get(name)
    if original is None or getattr(original, _MARK, False):
        return
    module, qualname = around.__module__, around.__qualname__

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        import importlib

        call = getattr(importlib.import_module(module), qualname)
        return call(original, self, args, kwargs)

    setattr(wrapper, _MARK, True)
    setattr(cls, name, wrapper)


def wrap_family(cls: type, hooks: dict[str, Around], *, framework: str) -> None:
    """Wrap ``hooks`` on ``cls`` and on every later subclass that overrides them.

    Raises:
        HookError: ``cls`` lacks one of the methods.
    """
    missing = [name for name in hooks if not callable(getattr(cls, name, None))]
    if missing:
        raise HookError(
            f"{framework}: {cls.__module__}.{cls.__qualname__} has no method "
            f"{', '.join(missing)}; rlprobe cannot capture its stages in this version"
        )
    for name, around in hooks.items():
        wrap_method(cls, name, around)
    own = cls.__dict__.get("__init_subclass__")

    def wrap_subclass(sub: type, **kwargs: Any) -> None:
        if own is not None:
            own.__get__(None, sub)(**kwargs)
        else:
            super(cls, sub).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        for name, around in hooks.items():
            wrap_method(sub, name, around)

    cls.__init_subclass__ = classmethod(wrap_subclass)  # type: ignore[assignment,arg-type]


def plain_class(cls: Any) -> Any:
    """The class itself where Ray has made an actor class of it already."""
    metadata = getattr(cls, "__ray_metadata__", None)
    return cls if metadata is None else metadata.modified_class
