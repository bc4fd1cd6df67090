"""Pickles read as data: nothing that they name is imported, and nothing is called.

An unpickler does what a pickle says. Here its opcodes are interpreted over plain values alone: a
class or a function is a :class:`Global`, which is two texts, and what it was called with is an
:class:`Object`, which keeps its arguments. What to make of one by name is its reader's business
(:mod:`.tensorpickle` for one tensor, :mod:`rlprobe.dumps.rollouts.plain` for batches).
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Global:
    """The name of a class or function."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Object:
    """What calling something would have made, had it been called."""

    made_by: Any
    arguments: tuple[Any, ...]
    #: What ``__setstate__`` would have been given; None where nothing was.
    state: Any = None
    #: What would have been put into it as into a mapping, and as into a list.
    items: list[tuple[Any, Any]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Persistent:
    """What stands for an object that is kept outside the pickle."""

    identity: Any


_MARK = object()


def parse(blob: bytes | memoryview, most: int) -> Any:
    """The value that a pickle describes, of plain values, lists, dicts and the classes above.

    Values that stand in it twice are one object; it may hold itself.

    Args:
        blob: the pickle.
        most: opcodes that are read.

    Raises:
        ValueError: it is damaged, too long, or of opcodes that nothing plain is written with.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(bytes(blob))):
            if count > most:
                raise ValueError(f"its pickle has more than {most} opcodes")
            name = opcode.name
            if name in _LITERALS:
                stack.append(argument)
            elif name == "STOP":
                return stack.pop()
            else:
                step = _STEPS.get(name)
                if step is None:
                    raise ValueError(f"its pickle uses {name}, which nothing plain needs; refused")
                step(stack, memo, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"its pickle is damaged: {error!r:.100}") from error
    raise ValueError("its pickle is cut short")


_LITERALS = frozenset(
    (
        "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT",
        "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINSTRING", "SHORT_BINSTRING",
        "STRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    )
)  # fmt: skip

_Stack = list[Any]
_Memo = dict[int, Any]
_Step = Callable[[_Stack, _Memo, Any], None]


def _marked(stack: _Stack) -> list[Any]:
    """Everything above the last mark."""
    at = len(stack) - 1
    while stack[at] is not _MARK:
        at -= 1
        if at < 0:
            raise IndexError("mark")
    found = stack[at + 1 :]
    del stack[at:]
    return found


def _last(count: int) -> _Step:
    def step(stack: _Stack, memo: _Memo, argument: Any) -> None:
        if len(stack) < count:
            raise IndexError("stack")
        found = tuple(stack[-count:])
        del stack[-count:]
        stack.append(found)

    return step


def _constant(value: Any) -> _Step:
    return lambda stack, memo, argument: stack.append(value)


def _fresh(make: Callable[[], Any]) -> _Step:
    return lambda stack, memo, argument: stack.append(make())


def _nothing(stack: _Stack, memo: _Memo, argument: Any) -> None:
    """Versions and frames say nothing of the value."""


def _pop(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.pop()


def _pop_mark(stack: _Stack, memo: _Memo, argument: Any) -> None:
    _marked(stack)


def _dup(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.append(stack[-1])


def _tuple(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.append(tuple(_marked(stack)))


def _list(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.append(_marked(stack))


def _dict(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.append(dict(_pairs(_marked(stack))))


def _frozenset(stack: _Stack, memo: _Memo, argument: Any) -> None:
    # a list: what stands in it need not be hashable here
    stack.append(_marked(stack))


def _pairs(flat: list[Any]) -> list[tuple[Any, Any]]:
    if len(flat) % 2:
        raise IndexError("a key without a value")
    return list(zip(flat[::2], flat[1::2], strict=True))


def _append(stack: _Stack, memo: _Memo, argument: Any) -> None:
    value = stack.pop()
    _extend(stack[-1], [value])


def _appends(stack: _Stack, memo: _Memo, argument: Any) -> None:
    values = _marked(stack)
    _extend(stack[-1], values)


def _extend(whole: Any, values: list[Any]) -> None:
    if isinstance(whole, Object):
        whole.values += values
    elif isinstance(whole, list):
        whole += values
    else:
        raise TypeError("values for what is no list")


def _set_item(stack: _Stack, memo: _Memo, argument: Any) -> None:
    value, key = stack.pop(), stack.pop()
    _update(stack[-1], [(key, value)])


def _set_items(stack: _Stack, memo: _Memo, argument: Any) -> None:
    pairs = _pairs(_marked(stack))
    _update(stack[-1], pairs)


def _update(whole: Any, pairs: list[tuple[Any, Any]]) -> None:
    if isinstance(whole, Object):
        whole.items += pairs
    elif isinstance(whole, dict):
        whole.update(pairs)
    else:
        raise TypeError("keys for what is no mapping")


def _put(stack: _Stack, memo: _Memo, argument: Any) -> None:
    memo[int(argument)] = stack[-1]


def _memoize(stack: _Stack, memo: _Memo, argument: Any) -> None:
    memo[len(memo)] = stack[-1]


def _get(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.append(memo[int(argument)])


def _global(stack: _Stack, memo: _Memo, argument: Any) -> None:
    module, _, name = argument.partition(" ")
    stack.append(Global(module, name))


def _stack_global(stack: _Stack, memo: _Memo, argument: Any) -> None:
    name, module = stack.pop(), stack.pop()
    stack.append(Global(str(module), str(name)))


def _persistent(stack: _Stack, memo: _Memo, argument: Any) -> None:
    stack.append(Persistent(stack.pop()))


def _reduce(stack: _Stack, memo: _Memo, argument: Any) -> None:
    arguments, function = stack.pop(), stack.pop()
    stack.append(Object(function, _arguments(arguments)))


def _new_with_keywords(stack: _Stack, memo: _Memo, argument: Any) -> None:
    keywords, arguments, function = stack.pop(), stack.pop(), stack.pop()
    stack.append(Object(function, (*_arguments(arguments), keywords)))


def _arguments(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise TypeError("arguments that are no tuple")
    return value


def _build(stack: _Stack, memo: _Memo, argument: Any) -> None:
    state = stack.pop()
    if not isinstance(stack[-1], Object):
        raise TypeError("a state for what has none")
    stack[-1].state = state


_STEPS: dict[str, _Step] = {
    "PROTO": _nothing,
    "FRAME": _nothing,
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    "MARK": _constant(_MARK),
    "POP": _pop,
    "POP_MARK": _pop_mark,
    "DUP": _dup,
    "EMPTY_TUPLE": _constant(()),
    "EMPTY_LIST": _fresh(list),
    "EMPTY_DICT": _fresh(dict),
    "EMPTY_SET": _fresh(list),
    "TUPLE1": _last(1),
    "TUPLE2": _last(2),
    "TUPLE3": _last(3),
    "TUPLE": _tuple,
    "LIST": _list,
    "DICT": _dict,
    "FROZENSET": _frozenset,
    "APPEND": _append,
    "APPENDS": _appends,
    "ADDITEMS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _memoize,
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "BINPERSID": _persistent,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_with_keywords,
    "BUILD": _build,
}
