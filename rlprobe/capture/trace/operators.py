"""Every operator that PyTorch's dispatcher sees, with its arguments as its schema names them.

ATen's, torch_npu's and any library's registered operators look alike here. A kernel that is
launched past the dispatcher (a bare Triton launch, a pybind extension) shows only in what it
leaves: a value that comes from elsewhere.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from rlprobe.capture.light.recompute import in_backward
from rlprobe.capture.trace.values import Values, plain

#: Tensors of one list that are described: fused optimizers are given all parameters at once.
_OF_A_LIST = 64
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_FRAMES = 60
#: Namespaces of collectives.
COLLECTIVES = ("c10d::", "_c10d_functional::")

Line = dict[str, Any]


class Operators(TorchDispatchMode):
    """Hands every operator it sees to ``write`` while ``wanted`` says so, and changes nothing.

    Args:
        values: numbers and describes tensors.
        wanted: whether operators are recorded now.
        write: takes a line; says whether another one will be taken.
        twice: says whether operators are run a second time on copies now, to see if they repeat.
    """

    def __init__(
        self,
        values: Values,
        wanted: Callable[[], bool],
        write: Callable[[Line], bool],
        twice: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.values = values
        self._wanted = wanted
        self._write = write
        self._twice = twice
        self._full = False
        #: ``(first number of an autograd node made after it, operator)`` in order.
        self._nodes: list[tuple[int, int]] = []
        self._count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._full or not self._wanted():
            return func(*args, **kwargs)
        with _disable_current_modes():
            line = self._begun(func, args, kwargs)
            again = _again(func, args, kwargs) if self._twice() else None
        result = func(*args, **kwargs)
        with _disable_current_modes():
            made = list(tensors(result)) or written(func, args)
            if again is not None and _differ(made, again):
                line["repeats"] = False
            line["outputs"] = [
                self._made(t, line["n"], index, func)
                for index, t in enumerate(itertools.islice(made, _OF_A_LIST))
            ]
            self._full = not self._write(line)
        return result

    def child(self, name: str, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A module that ran within and is not watched: one line for all its operators."""
        with _disable_current_modes():
            self._full = not self._write({
                "record": "operator", "n": self._next(), "direction": "forward",
                "name": f"module::{name}", "site": None, "node": None,
                "arguments": [
                    {"name": str(index), "tensors": [self._value(t, made=False)]}
                    for index, t in enumerate(tensors((args, kwargs)))
                ],
                "outputs": [self.values.entered(t, f"module {name}") for t in tensors(output)],
            })  # fmt: skip

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _begun(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Line:
        number = self._next()
        backward = in_backward()
        node = torch._C._current_autograd_node() if backward else None
        line: Line = {
            "record": "operator",
            "n": number,
            "direction": "backward" if backward else "forward",
            "name": name_of(func),
            "site": None if backward else site(),
            "node": None if node is None else node.name(),
        }
        if node is not None:
            line["of"] = self._made_by(node._sequence_nr())
        elif torch.is_grad_enabled():
            self._nodes.append((int(torch.autograd._get_sequence_nr()), number))
        line["arguments"] = list(self._arguments(func, args, kwargs))
        return line

    def _made_by(self, sequence: int) -> int | None:
        """The forward operator behind a node of the graph."""
        return next((number for after, number in self._nodes if after > sequence), None)

    def _arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Line]:
        schema = getattr(getattr(func, "_schema", None), "arguments", ())
        names = [a.name for a in schema]
        for index, value in enumerate(args):
            yield self._argument(names[index] if index < len(names) else str(index), value)
        for name, value in kwargs.items():
            yield self._argument(name, value)
        # what the call left at its default is as much an argument as what it gave
        for argument in schema[len(args) :]:
            if argument.name not in kwargs and argument.has_default_value():
                value = self._argument(argument.name, argument.default_value)
                if value.get("scalar") is not None:
                    yield {**value, "default": True}

    def _argument(self, name: str, value: Any) -> Line:
        found = list(itertools.islice(tensors(value), _OF_A_LIST))
        if found:
            line: Line = {"name": name, "tensors": [self._value(t, made=False) for t in found]}
            if isinstance(value, (list, tuple)):
                line["list"] = len(value)
                line["places"] = [i for i, v in enumerate(value) if isinstance(v, Tensor)]
            return line
        return {"name": name, "scalar": scalar(value)}

    def _made(self, tensor: Tensor, number: int, index: int, func: Any) -> Line:
        """What an operator made; of one that draws random numbers the numbers are kept.

        A collective fills its tensors later: they are described where they are used.
        """
        if name_of(func).startswith(COLLECTIVES):
            return self.values.pending(tensor)
        if name_of(func).startswith(_RESERVES):
            self.values.reserved(tensor)
        found = self._value(tensor, made=True)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            found = {**found, "data": self.values.save(tensor, f"drawn{number}.{index}")}
        return found

    def _value(self, tensor: Tensor, *, made: bool) -> Line:
        return self.values.made(tensor) if made else self.values.given(tensor)


#: Operators that reserve memory, by how their names begin.
_RESERVES = ("aten::empty", "aten::new_empty")
#: Larger inputs are not copied to run an operator twice.
_TWICE = 1 << 26


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
    """What an operator makes of copies of its arguments; None where that would not be the same.

    Draws of random numbers, views and collectives are not run, nor what is spread over ranks.
    """
    given = list(tensors((args, kwargs)))
    if not given or any(type(t) not in _PLAIN or t.numel() > _TWICE for t in given):
        return None
    tags = getattr(func, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or not name_of(func).startswith("aten::"):
        return None
    if getattr(func, "is_view", False):
        return None
    args, kwargs = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (args, kwargs))
    try:
        result = func(*args, **kwargs)
    except RuntimeError:
        return None  # it takes no copies, as what resizes its output's storage
    return list(tensors(result)) or written(func, args)


_PLAIN = (Tensor, torch.nn.Parameter)


def _differ(made: list[Tensor], again: list[Tensor]) -> bool:
    try:
        return not equal(made, again)
    except RuntimeError:
        return False  # of a format that cannot be compared


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether tensors are equal, bit for bit but for what is not finite."""
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


def name_of(func: Any) -> str:
    """``aten::add.Tensor``: namespace, operator, overload."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return str(func)
    overload = getattr(func, "_overloadname", "default")
    return str(schema.name) + ("" if overload in ("default", "") else f".{overload}")


def written(func: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What an operator in place has changed, by its schema."""
    schema = getattr(getattr(func, "_schema", None), "arguments", ())
    return [
        tensor
        for argument, value in zip(schema, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors(value)
    ]


def tensors(value: Any) -> Iterator[Tensor]:
    """Tensors of a nest, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def scalar(value: Any) -> Any:
    """An argument that is no tensor, as JSON can hold it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return plain(value.item())
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, float):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [scalar(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return type(value).__name__  # a generator: its text has an address


def site() -> str | None:
    """``file.py:line function`` of the caller, neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return None
        code = frame.f_code
        if not code.co_filename.startswith(_OWN) and not code.co_filename.startswith("<"):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return None
