"""The names of ``torch.cuda`` that Megatron-LM uses, answered by the CPU.

Megatron asks for "the current CUDA device" throughout and never for a device of its caller's. Here
that device is the CPU: a device given as ``cuda`` or by number means it, random states are the
CPU's, streams and events do nothing, memory counts nothing. Computation is torch's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

#: Functions that make a tensor, of which the ``device`` is looked at.
_MAKERS = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
_NOTHING = (
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)
_NO_MEMORY = (
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
)
_enabled = False


class _Generators:
    """``torch.cuda.default_generators``: there is one."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


class _Stream:
    """A stream of work that is done when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event(_Stream):
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def enable() -> None:
    """Put the names there, once a process and before Megatron is imported."""
    global _enabled
    if _enabled:
        return
    _enabled = True
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "cpu"
    cuda.mem_get_info = lambda *_: (1 << 34, 1 << 34)
    for name in _NO_MEMORY:
        setattr(cuda, name, lambda *_, **__: 0)
    for name in _NOTHING:
        setattr(cuda, name, lambda *_, **__: None)
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda *_, **__: torch.get_rng_state()
        owner.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # how Megatron sets the state of an initialised device
    cuda._lazy_call = lambda call, **_: call()
    cuda.default_generators = _Generators()
    # the CPU's generator is seeded by torch.manual_seed, which Megatron calls as well
    cuda.manual_seed = cuda.manual_seed_all = lambda *_: None
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.type = _named_as_on_cuda(tensor.type)
    tensor.to = _on_cpu(tensor.to)
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self
    for name in _MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes a device, with CUDA's meaning the CPU."""

    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        # a bare number is an index of the current accelerator
        if isinstance(device, int) or _is_cuda(device):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if any(_is_cuda(arg) for arg in args):
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        return make(*args, **kwargs)

    return wrapper


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    # a CpuId of the platform is a text as well, and is the CPU already
    return isinstance(value, str) and value.startswith("cuda")


def _named_as_on_cuda(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron sorts gradients by the name of their tensors' type on a GPU."""

    @functools.wraps(type_of)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return wrapper
