"""Running verl in fp64: the high-precision control of a benchmark that is fp32 already.

Two things stand in the way. verl's table of precisions ends at fp32; and models compute norms,
softmax and rotary angles "in fp32 at least" by casting to it, which in an fp64 run throws away what
it is for. Here the table learns fp64, and in a forward of an fp64 engine what casts fp64 numbers or
integers to fp32 makes fp64 of them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMES = ("fp64", "float64", torch.float64)


def teach(module: ModuleType) -> None:
    """Let ``PrecisionType`` of ``verl.utils.torch_dtypes`` know fp64, which it refuses."""
    kind = module.PrecisionType
    to_dtype, to_str = kind.to_dtype, kind.to_str

    @functools.wraps(to_dtype)
    def any_dtype(precision: Any) -> torch.dtype:
        return torch.float64 if precision in _NAMES else to_dtype(precision)

    @functools.wraps(to_str)
    def any_str(precision: Any) -> str:
        return "fp64" if precision == torch.float64 else to_str(precision)

    kind.to_dtype, kind.to_str = staticmethod(any_dtype), staticmethod(any_str)


class Wide(TorchFunctionMode):
    """fp64 numbers and integers are not cast to fp32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and _widens(args[0]):
            if func is Tensor.float:
                return args[0].double()
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


def _widens(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64 or not (tensor.is_floating_point() or tensor.is_complex())


def around(engine: Any) -> contextlib.AbstractContextManager[Any]:
    """What an engine's forward runs in: :class:`Wide` where it computes in fp64."""
    if getattr(engine, "_autocast_dtype", None) == torch.float64:
        return Wide()
    return contextlib.nullcontext()
