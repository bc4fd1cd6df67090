"""The pickle inside a ``.pt`` file of one tensor, understood without unpickling.

``torch.save(tensor)`` writes a call of ``torch._utils._rebuild_tensor_v2`` (or ``_v3``, or
``_rebuild_parameter`` around it) on a persistent storage id. The only names that mean anything are
those calls, torch's storages and dtypes and an empty ``OrderedDict``. Anything else is refused, and
nothing is ever imported or called (:mod:`.pickled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlprobe.dumps.tensors import pickled
from rlprobe.dumps.tensors.dtypes import DTYPES, STORAGES
from rlprobe.dumps.tensors.pickled import Global, Object, Persistent

MAX_BYTES = 1 << 16
_MAX_OPCODES = 2000
_MAX_RANK = 64
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_TENSOR, _TYPED = (Global("torch._utils", f"_rebuild_tensor_v{n}") for n in (2, 3))
_HOOKS = Global("collections", "OrderedDict")
#: Calls that :func:`layout` understands.
CALLS = frozenset((_PARAMETER, _TENSOR, _TYPED))


@dataclass(frozen=True)
class Layout:
    """A tensor over a storage; strides and offset in elements."""

    storage: str
    dtype: str
    #: Elements the storage claims to hold.
    storage_size: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str | None
    size: int


def parse(blob: bytes) -> Layout:
    """The tensor a pickle describes.

    Raises:
        ValueError: it describes anything else.
    """
    if len(blob) > MAX_BYTES:
        raise ValueError(f"its pickle has {len(blob)} bytes: more than one tensor")
    value = pickled.parse(blob, _MAX_OPCODES)
    if not isinstance(value, Object):
        raise ValueError(f"it holds {_what(value)}, not one tensor")
    found = layout(value)
    _require_nothing_else(value)
    return found


def layout(call: Object) -> Layout:
    """The tensor that a call would have made.

    Raises:
        ValueError: it is no call that makes one, or its numbers make no sense.
    """
    call = _inner(call)
    made_by, arguments = call.made_by, call.arguments
    if made_by not in (_TENSOR, _TYPED):
        raise ValueError(f"its pickle calls {made_by!s:.80}; only a tensor is accepted")
    if len(arguments) < (4 if made_by == _TENSOR else 7):
        raise ValueError("a tensor in it lacks its size")
    storage = _storage(arguments[0])
    offset, shape, strides = arguments[1:4]
    kind = arguments[6] if made_by == _TYPED else None
    _require_plain(arguments[6 if made_by == _TENSOR else 7 :])
    if made_by == _TENSOR:
        dtype = storage.dtype
    else:
        dtype = kind.name if isinstance(kind, Global) and kind.module == "torch" else None
    if dtype is None or dtype not in DTYPES:
        raise ValueError(f"element type {dtype} is not known")
    shape, strides = sizes(shape), sizes(strides)
    numbers = (*shape, *strides, offset, storage.size)
    if (
        len(shape) != len(strides)
        or len(shape) > _MAX_RANK
        or any(type(n) is not int or n < 0 for n in numbers)
    ):
        raise ValueError("its shape, strides or offset make no sense")
    size = storage.size if storage.dtype is not None else storage.size // DTYPES[dtype].size
    return Layout(storage.key, dtype, size, offset, shape, strides)


def _require_plain(beside: Sequence[Any]) -> None:
    """Refuse what torch says of a view whose numbers are not those of its storage.

    ``{"conj": True}`` is a complex tensor that is read conjugated, ``{"neg": True}`` one that is
    read negated (``torch._utils.get_tensor_metadata``).
    """
    marks = {str(key) for value in beside if isinstance(value, dict) for key in value if value[key]}
    if marks:
        raise ValueError(
            f"it is a view marked {', '.join(sorted(marks))}, whose numbers are not those that the "
            "file holds: save it after resolve_conj().resolve_neg()"
        )


def sizes(value: Any) -> tuple[Any, ...]:
    """A shape: a tuple, or ``torch.Size`` of one.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Object) and value.made_by == Global("torch", "Size") and value.arguments:
        value = value.arguments[0]
    if not isinstance(value, (tuple, list)):
        raise ValueError("its shape, strides or offset make no sense")
    return tuple(value)


def _inner(call: Object) -> Object:
    """The tensor of a parameter; of anything else, itself."""
    first = call.arguments[0] if call.arguments else None
    return first if call.made_by == _PARAMETER and isinstance(first, Object) else call


def _require_nothing_else(call: Object) -> None:
    """Refuse hooks and whatever else may stand beside a tensor's numbers."""
    inner = _inner(call)
    beside = [*call.arguments[1:], *(inner.arguments[1:] if inner is not call else ())]
    for argument in beside:
        empty = isinstance(argument, Object) and not (
            argument.arguments or argument.items or argument.values or argument.state
        )
        if isinstance(argument, Object) and not (empty and argument.made_by == _HOOKS):
            raise ValueError(
                f"its pickle calls {argument.made_by!s:.80}; only a tensor is accepted"
            )
    if any(one.state is not None or one.items or one.values for one in (call, inner)):
        raise ValueError("its pickle holds more than a tensor")


def _storage(value: Any) -> _Storage:
    """``("storage", storage type, key, location, elements)``."""
    identity = value.identity if isinstance(value, Persistent) else None
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
        raise ValueError("a persistent id is no storage")
    kind, key, size = identity[1], identity[2], identity[4]
    if not isinstance(kind, Global) or not isinstance(key, str) or type(size) is not int:
        raise ValueError("a persistent id is no storage")
    if kind.name == "UntypedStorage" and kind.module in ("torch.storage", "torch"):
        return _Storage(key, None, size)
    if kind.module != "torch" or kind.name not in STORAGES:
        raise ValueError(f"storage type {kind} is not known")
    return _Storage(key, STORAGES[kind.name], size)


def _what(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__.lower()
