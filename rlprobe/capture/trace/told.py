"""Numbers that a module was built with: epsilons, scales, caps, counts, switches.

Operators are given most of them as arguments, and a trace shows those. A kernel that hides what it
runs shows none: an inference engine's attention is one operator, given the name of its layer, and
the scale of its scores is an attribute of an object that the layer holds.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: Numbers of one module and those below.
MOST = 2_000
_NO_HOLDER = (
    nn.Module, Tensor, type, types.ModuleType, types.FunctionType, types.MethodType,
    types.BuiltinFunctionType,
)  # fmt: skip


@dataclass(frozen=True)
class Told:
    """One number, and whose attribute it is."""

    owner: Any
    attribute: str
    value: Any


def told(module: nn.Module) -> dict[str, Told]:
    """What a module, those below and the objects that they hold were told, by name.

    Names are ``{module below}.{attribute}``, or ``….{object}.{attribute}``; what begins with an
    underscore is the module's own affair. An object that several hold is listed once.
    """
    found: dict[str, Told] = {}
    seen: set[int] = set()
    for path, part in module.named_modules():
        before = f"{path}." if path else ""
        held = {name: value for name, value in _public(part) if _holds(value)}
        for name, value in _public(part):
            if _is_number(value) and name != "training":
                found[before + name] = Told(part, name, value)
        for name, holder in held.items():
            if id(holder) not in seen:
                seen.add(id(holder))
                for inner, value in _public(holder):
                    if _is_number(value):
                        found[f"{before}{name}.{inner}"] = Told(holder, inner, value)
    return dict(itertools.islice(found.items(), MOST))


def _public(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if not name.startswith("_")]


def _holds(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDER)


def _is_number(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float)


def unchanged(before: Mapping[str, Told], module: nn.Module) -> dict[str, Told]:
    """What a module is told still: what its own calls change (a counter) nobody told it."""
    now = told(module)
    return {
        name: one for name, one in before.items()
        if name in now and now[name].owner is one.owner and _equal(now[name].value, one.value)
    }  # fmt: skip


def others(own: Mapping[str, Told], theirs: Mapping[str, Any]) -> dict[str, tuple[Told, Any]]:
    """What a module was told otherwise than another one of the same name, and what that was told.

    Args:
        own: this side's, by name.
        theirs: numbers by name, as JSON gives them back.
    """
    return {
        name: (one, theirs[name])
        for name, one in own.items()
        if name in theirs and _is_number(theirs[name]) and not _equal(one.value, theirs[name])
    }


def _equal(one: Any, other: Any) -> bool:
    # 0 and False, 1 and 1.0 are told alike; nan is what it is
    return bool(one == other) or (one != one and other != other)


def is_harmless(own: Told, value: Any) -> bool:
    """Whether a number may be another one for a call: one that scales, guards or caps.

    Whole numbers are sizes too, of buffers that a kernel reads and writes without looking.
    """
    return float in (type(own.value), type(value))


@contextmanager
def instead(changes: Mapping[str, tuple[Told, Any]]) -> Iterator[None]:
    """For the time of the body modules have other numbers; afterwards their own again."""
    done: list[Told] = []
    try:
        for own, value in changes.values():
            setattr(own.owner, own.attribute, value)
            done.append(own)
        yield
    finally:
        for own in reversed(done):
            setattr(own.owner, own.attribute, own.value)
