"""What megatron-core needs to run without a GPU: devices it names outright, and random state."""

import contextlib
import functools

import torch


def _on_cpu(make):
    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return wrapper


def _named_as_on_cuda(type_of):
    @functools.wraps(type_of)
    def wrapper(self, *args, **kwargs):
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return wrapper


def enable():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    # Megatron's mixed-precision optimizer asks for the name of a tensor's type
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)
    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
