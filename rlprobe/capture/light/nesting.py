"""Turning what a module takes and returns into nests of leaves, as msprobe spells them.

The rules are those of mindstudio-probe 26 (``BaseDataProcessor.recursive_apply_transform``):
tuples and lists become lists, dicts, dataclasses (so Hugging Face's ``ModelOutput``) and named
tuples become objects, anything unknown becomes null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlprobe.capture.engine import Nest

#: Deeper nesting than this is cut off: a structure that contains itself must end somewhere.
MAX_DEPTH = 32

_SCALARS = (bool, int, float, str)
_dataclasses: dict[type, tuple[str, ...] | None] = {}


def _fields(cls: type) -> tuple[str, ...] | None:
    """Field names of a dataclass or named tuple, None for other classes."""
    if cls not in _dataclasses:
        names: tuple[str, ...] | None = None
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            names = tuple(cls._fields)
        elif dataclasses.is_dataclass(cls):
            names = tuple(field.name for field in dataclasses.fields(cls))
        _dataclasses[cls] = names
    return _dataclasses[cls]


def nest(value: Any, leaf: Callable[[Tensor], dict[str, Any]], depth: int = 0) -> Nest:
    """``value`` with every tensor replaced by its leaf.

    Args:
        value: whatever a module took or returned.
        leaf: makes a tensor's leaf.
    """
    if value is None or depth > MAX_DEPTH:
        return None
    if isinstance(value, Tensor):
        return leaf(value)
    cls = type(value)
    if cls in _SCALARS:
        return {"type": cls.__name__, "value": value}
    names = _fields(cls)
    if names is not None:
        return {name: nest(getattr(value, name), leaf, depth + 1) for name in names}
    if isinstance(value, torch.Size):
        return {"type": "torch.Size", "value": [int(n) for n in value]}
    if isinstance(value, (list, tuple)):
        return [nest(item, leaf, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_key(key): nest(item, leaf, depth + 1) for key, item in value.items()}
    return _other(value)


def _key(key: Any) -> Any:
    return key if isinstance(key, _SCALARS) else str(key)


def _other(value: Any) -> Nest:
    if isinstance(value, _SCALARS):  # subclasses: enums of int or str
        base = next(kind for kind in _SCALARS if isinstance(value, kind))
        return {"type": type(value).__name__, "value": base(value)}
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, np.generic):
        return {"type": type(value).__name__, "value": value.item()}
    if isinstance(value, torch.dtype):
        return {"type": "torch.dtype", "value": str(value)}
    if isinstance(value, torch.device):
        return {"type": "torch.device", "value": f"{value.type}:{value.index}"}
    if isinstance(value, slice):
        ends = [value.start, value.stop, value.step]
        return {"type": "slice", "value": [None if end is None else int(end) for end in ends]}
    if value is Ellipsis:
        return {"type": "ellipsis", "value": "..."}
    return None


def _array(value: np.ndarray[Any, Any]) -> Nest:
    leaf: dict[str, Any] = {
        "type": "numpy.ndarray",
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "Max": None,
        "Min": None,
        "Mean": None,
        "Norm": None,
    }
    if value.size and value.dtype.kind in "biuf":
        leaf["Max"] = value.max().item()
        leaf["Min"] = value.min().item()
        leaf["Mean"] = float(value.mean())
        leaf["Norm"] = float(np.linalg.norm(value.reshape(-1)))
    return leaf


def with_gradient(value: Any) -> list[Tensor]:
    """The tensors in ``value`` that a gradient flows through, in order of appearance."""
    found: list[Tensor] = []
    _collect(value, found, 0)
    return found


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            found.append(value)
    elif depth <= MAX_DEPTH:
        if isinstance(value, (list, tuple)):
            for item in value:
                if item is not None:
                    _collect(item, found, depth + 1)
        elif isinstance(value, dict):
            for item in value.values():
                if item is not None:
                    _collect(item, found, depth + 1)
