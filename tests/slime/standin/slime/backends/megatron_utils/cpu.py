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


def enable():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()
