"""``torch.cpu`` as verl takes an accelerator's module: with its memory, its random state, its one
device.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch


class CpuId(str):
    """A device id that is "cpu" to torch and 0 where verl formats or counts with it."""

    def __format__(self, spec: str) -> str:
        return "0"

    def __int__(self) -> int:
        return 0

    __index__ = __int__


@functools.cache
def device_module() -> types.ModuleType:
    """``torch.cpu`` with the functions of an accelerator module that verl calls."""
    module = types.ModuleType("rlprobe_cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    answers: dict[Callable[..., Any], tuple[str, ...]] = {
        zero: (
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        ),
        nothing: (
            "empty_cache",
            "ipc_collect",
            "reset_peak_memory_stats",
            "reset_max_memory_allocated",
            "set_device",
            "synchronize",
            "set_per_process_memory_fraction",
        ),
        lambda *args, **kwargs: (0, 0): ("mem_get_info",),
        # an accelerator that is not there: cache clearing and the like do nothing
        lambda: False: ("is_available",),
        lambda: 1: ("device_count",),
        lambda: CpuId("cpu"): ("current_device",),
        lambda *args, **kwargs: "cpu": ("get_device_name",),
        lambda seed: torch.manual_seed(seed): ("manual_seed", "manual_seed_all"),
        lambda *args, **kwargs: torch.get_rng_state(): ("get_rng_state",),
        lambda state, *args, **kwargs: torch.set_rng_state(state): ("set_rng_state",),
    }
    for function, names in answers.items():
        for name in names:
            setattr(module, name, function)
    return module
