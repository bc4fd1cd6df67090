"""The pickle inside a ``.pt`` file, understood without unpickling.

``torch.save(tensor)`` writes a call of ``torch._utils._rebuild_tensor_v2`` (or ``_v3``, or
``_rebuild_parameter`` around it) on a persistent storage id. The opcodes are interpreted here over
plain data; the only names that mean anything are those calls, torch's storages and dtypes and an
empty ``OrderedDict``. Anything else is refused, and nothing is ever imported or called.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

from rlprobe.dumps.tensors.dtypes import DTYPES, STORAGES

MAX_BYTES = 1 << 16
_MAX_OPCODES = 2000
_MAX_RANK = 64


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
class _Name:
    module: str
    name: str


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str | None
    size: int


class _Empty:
    """An empty OrderedDict: a tensor's backward hooks, of which a saved one has none."""


_MARK = object()


def parse(blob: bytes) -> Layout:
    """The tensor a pickle describes.

    Raises:
        ValueError: it describes anything else.
    """
    if len(blob) > MAX_BYTES:
        raise ValueError(f"its pickle has {len(blob)} bytes: more than one tensor")
    value = _run(blob)
    if not isinstance(value, Layout):
        raise ValueError(f"it holds {_what(value)}, not one tensor")
    return value


def _run(blob: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    count = 0
    try:
        for opcode, argument, _ in pickletools.genops(blob):
            count += 1
            if count > _MAX_OPCODES:
                raise ValueError("its pickle is too long for one tensor")
            name = opcode.name
            if name == "STOP":
                return stack.pop()
            _step(name, argument, stack, memo)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"its pickle is damaged: {error!r}") from error
    raise ValueError("its pickle is cut short")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in ("PROTO", "FRAME"):
        return
    if name in _LITERALS:
        stack.append(argument)
    elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
        stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "EMPTY_TUPLE":
        stack.append(())
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        size = int(name[-1])
        if len(stack) < size:
            raise IndexError("stack")
        last = tuple(stack[-size:])
        del stack[-size:]
        stack.append(last)
    elif name == "TUPLE":
        items: list[Any] = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        stack.append(tuple(reversed(items)))
    elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
        memo[int(argument)] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET", "GET"):
        stack.append(memo[int(argument)])
    elif name == "GLOBAL":
        module, _, attribute = argument.partition(" ")
        stack.append(_Name(module, attribute))
    elif name == "STACK_GLOBAL":
        attribute, module = stack.pop(), stack.pop()
        stack.append(_Name(str(module), str(attribute)))
    elif name == "BINPERSID":
        stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        stack.append(_call(function, arguments))
    else:
        raise ValueError(f"its pickle uses {name}, which no tensor needs; refused")


_LITERALS = frozenset(
    (
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "INT",
        "LONG",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    )
)


def _storage(identity: Any) -> _Storage:
    """``("storage", storage type, key, location, elements)``."""
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
        raise ValueError("a persistent id is no storage")
    kind, key, size = identity[1], identity[2], identity[4]
    if not isinstance(kind, _Name) or not isinstance(key, str) or type(size) is not int:
        raise ValueError("a persistent id is no storage")
    if kind.name == "UntypedStorage" and kind.module in ("torch.storage", "torch"):
        return _Storage(key, None, size)
    if kind.module != "torch" or kind.name not in STORAGES:
        raise ValueError(f"storage type {kind.module}.{kind.name} is not known")
    return _Storage(key, STORAGES[kind.name], size)


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise ValueError("its pickle calls something that is no function")
    name = (function.module, function.name)
    if name == ("collections", "OrderedDict") and arguments == ():
        return _Empty()
    if name == ("torch._utils", "_rebuild_parameter") and isinstance(arguments[0], Layout):
        return arguments[0]
    if name == ("torch._utils", "_rebuild_tensor_v2"):
        storage, offset, shape, strides = arguments[:4]
        dtype = storage.dtype if isinstance(storage, _Storage) else None
    elif name == ("torch._utils", "_rebuild_tensor_v3"):
        storage, offset, shape, strides = arguments[:4]
        kind = arguments[6]
        dtype = kind.name if isinstance(kind, _Name) and kind.module == "torch" else None
    else:
        raise ValueError(f"its pickle calls {'.'.join(name):.80}; only a tensor is accepted")
    if not isinstance(storage, _Storage) or dtype not in DTYPES:
        raise ValueError(f"element type {dtype} is not known")
    sizes = (*shape, *strides, offset, storage.size)
    if (
        len(shape) != len(strides)
        or len(shape) > _MAX_RANK
        or any(type(n) is not int or n < 0 for n in sizes)
    ):
        raise ValueError("its shape, strides or offset make no sense")
    size = storage.size if storage.dtype is not None else storage.size // DTYPES[dtype].size
    return Layout(storage.key, dtype, size, offset, tuple(shape), tuple(strides))


def _what(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__.strip("_").lower()
