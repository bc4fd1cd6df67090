"""The suspect once more, beside its own call: twice the same, and in fp64.

Nothing is left behind: no gradient is kept, random generators are put back as the call left them,
and its parameters are its own again. Where it cannot be done, the reason is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from rlprobe.capture.trace.operators import COLLECTIVES, equal, name_of, tensors
from rlprobe.capture.trace.values import content, unpacked

Generators = dict[str, Tensor]


@contextmanager
def unseen() -> Iterator[None]:
    """Operators of the body are of no trace."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    with _disable_current_modes():
        yield


def generators(device: torch.device) -> Generators:
    """The state of the random generators that an operator may draw from."""
    found = {"cpu": torch.get_rng_state()}
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None and hasattr(module, "get_rng_state"):
        found[device.type] = module.get_rng_state(device)
    return found


def put_back(state: Generators, device: torch.device) -> None:
    """Set them to an earlier state."""
    torch.set_rng_state(state["cpu"])
    if device.type in state and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state[device.type], device)


class Before:
    """A call about to run: its inputs as they are now, and the generators' state."""

    def __init__(self, args: Any, kwargs: dict[str, Any], device: torch.device) -> None:
        self.device = device
        self.args, self.kwargs = tree_map(_copied, (args, kwargs))
        self.state = generators(device)


def _copied(value: Any) -> Any:
    # a copy: an operator in place may change what the call was given
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def rerun(module: nn.Module, before: Before, output: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Run a module again on what it was given.

    Args:
        module: its hooks are not to run: the caller sees to that.
        before: the call.
        output: what it returned.

    Returns:
        what was found, for the trace, and the outputs in fp64 (none where it could not be done).
    """
    found: dict[str, Any] = {"record": "again"}
    first = [unpacked(t).detach() for t in tensors(output)]
    after = generators(before.device)
    wide: list[Tensor] = []
    try:
        with torch.no_grad(), Alone():
            put_back(before.state, before.device)
            same = _outputs(module, before)
            found["repeats"] = equal(first, same)
            if found["repeats"] is False:
                found["difference"] = difference(first, same)
            # other random numbers: what dropout left on would show
            put_back(after, before.device)
            drawn = _outputs(module, before)
            found["draws"] = not equal(same, drawn)
    except Exception as error:  # noqa: BLE001 - a kernel may refuse in any way: it is recorded
        found["failed"] = f"{type(error).__name__}: {error}"[:500]
    try:
        with torch.no_grad(), Alone(), Wide():
            put_back(before.state, before.device)
            own = {n: _widened(t) for n, t in [*module.named_parameters(), *module.named_buffers()]}
            args, kwargs = tree_map(_widened, (before.args, before.kwargs))
            output = torch.func.functional_call(module, own, args, kwargs)
            wide = [unpacked(t).detach() for t in tensors(output)]
            found["wide"] = [content(t) for t in wide]
    except Exception as error:  # noqa: BLE001 - likewise
        found["wide_failed"] = f"{type(error).__name__}: {error}"[:500]
        wide = []
    put_back(after, before.device)
    return found, wide


def _outputs(module: nn.Module, before: Before) -> list[Tensor]:
    args, kwargs = tree_map(_copied, (before.args, before.kwargs))
    return [unpacked(t).detach() for t in tensors(module.forward(*args, **kwargs))]


def difference(one: list[Tensor], other: list[Tensor]) -> float | None:
    """Largest relative L2 difference of the outputs."""
    sizes = [
        float((b.double() - a.double()).norm() / a.double().norm().clamp_min(1e-300))
        for a, b in zip(one, other, strict=False)
        if a.shape == b.shape and a.is_floating_point()
    ]
    return max(sizes, default=None)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.double() if value.is_floating_point() else value
    return value


class Alone(TorchDispatchMode):
    """Refuses collectives: one rank alone runs something again, and would wait for the others."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = name_of(func)
        if name.startswith(COLLECTIVES):
            raise RuntimeError(f"{name} needs the other ranks, which do not run this again")
        return func(*args, **(kwargs or {}))


class Wide(TorchDispatchMode):
    """Casts to any floating-point type become casts to fp64, so that "compute in fp32" does too."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        args = tuple(
            torch.float64 if isinstance(a, torch.dtype) and a.is_floating_point else a for a in args
        )
        return func(*args, **kwargs)


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Take every hook off a module and those below, for the time of a second call."""
    kept: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
                     "_backward_pre_hooks"):  # fmt: skip
            hooks = part.__dict__.get(name)
            if hooks:
                kept.append((part, name, hooks))
                part.__dict__[name] = type(hooks)()
    try:
        yield
    finally:
        for part, name, hooks in kept:
            part.__dict__[name] = hooks
