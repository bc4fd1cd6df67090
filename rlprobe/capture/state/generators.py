"""States of the random generators that training may draw from (dropout, routing noise)."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

CPU = "cpu"


def kept() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states now: of torch by device kind, as tensors; of Python and numpy, as JSON."""
    tensors = {CPU: torch.get_rng_state()}
    device = _accelerator()
    if device is not None:
        tensors[device[0]] = device[1].get_rng_state().cpu()
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss),
                  float(cached)],
    }  # fmt: skip
    return tensors, plain


def restore(tensors: dict[str, Tensor], plain: dict[str, Any]) -> str | None:
    """Put states back.

    Returns:
        Why one of them could not be, in words; None where all were. A generator of another kind of
        device has another state, and draws other numbers.
    """
    torch.set_rng_state(tensors[CPU])
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    device = _accelerator()
    own = CPU if device is None else device[0]
    known = [name for name in tensors if name != CPU]
    if device is not None and own in tensors:
        device[1].set_rng_state(tensors[own])
        return None
    if own == CPU and not known:
        return None
    return f"the benchmark drew on {known[0] if known else CPU}, this device is {own}"


def _accelerator() -> tuple[str, ModuleType] | None:
    """Kind of the device that this process computes on, and torch's module of it."""
    for name in ("npu", "cuda"):
        module = getattr(torch, name, None)  # torch.npu is there once torch_npu is imported
        if module is not None and module.is_available() and module.is_initialized():
            return name, module
    return None
