"""torch.cuda's names on the CPU, so that Megatron-LM and slime run without a GPU."""

import contextlib
import functools

import torch

_enabled = False


def enable():
    """Once per process, before Megatron is imported."""
    global _enabled
    if _enabled:
        return
    _enabled = True
    cuda = torch.cuda
    cuda.current_device = lambda: 0
    cuda.is_initialized = cuda.is_available = lambda: True
    for owner in (cuda, cuda.random):
        owner.get_rng_state = lambda *_, **__: torch.get_rng_state()
        owner.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # how Megatron sets the state of an initialised device
    cuda._lazy_call = lambda call, **_: call()
    cuda.default_generators = _Generators()
    cuda.manual_seed = cuda.manual_seed_all = lambda *_: None
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_name = lambda *_: "cpu"
    cuda.device_count = lambda: 1
    cuda.mem_get_info = lambda *_: (1 << 34, 1 << 34)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *_, **__: 0)
    nothing = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
    for name in nothing:
        setattr(cuda, name, lambda *_, **__: None)
    cuda.Event = _Event
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.Stream = _Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)
    torch.Tensor.to = _off_cuda(torch.Tensor.to)
    for name in (
        "tensor",
        "zeros",
        "empty",
        "ones",
        "full",
        "arange",
        "empty_like",
        "zeros_like",
        "randn",
        "rand",
        "as_tensor",
    ):
        setattr(torch, name, _off_cuda(getattr(torch, name)))
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward = _one_sequence(DotProductAttention.forward)


class _Generators:
    def __getitem__(self, _):
        return torch.default_generator


class _Stream:
    def __getattr__(self, name):
        return lambda *_, **__: None


class _Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        pass

    def wait(self, *_):
        pass

    def query(self):
        return True

    def elapsed_time(self, _):
        return 0.0


def _off_cuda(make):
    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        if "device" in kwargs and _is_cuda(kwargs["device"], number=True):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*("cpu" if _is_cuda(arg) else arg for arg in args), **kwargs)

    return wrapper


def _is_cuda(value, number=False):
    if isinstance(value, (str, torch.device)):
        return str(value).startswith("cuda")
    return number and isinstance(value, int)


def _named_as_on_cuda(type_of):
    """Megatron tells tensors by the name of their type on a GPU."""

    @functools.wraps(type_of)
    def wrapper(self, *args, **kwargs):
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return wrapper


def _one_sequence(forward):
    """Megatron's plain attention over a packed sequence, which only Transformer Engine's takes.

    With one sample a micro-batch, padding behind it, causal attention over the whole is the same.
    """

    @functools.wraps(forward)
    def wrapper(self, query, key, value, *args, packed_seq_params=None, **kwargs):
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return forward(self, query, key, value, *args, **kwargs)

    return wrapper
