"""verl on a CPU: a platform, and the few places where verl takes an accelerator for granted.

Loaded by verl itself in every process (``VERL_USE_EXTERNAL_MODULES=rlprobe.frameworks.verl,
rlprobe.frameworks.verl.cpu``). No file of verl is edited. What each part is for:

===================================  ==============================================================
``CpuPlatform``                      verl's platform registry knows accelerators only
``VERL_ENGINE_DEVICE=cuda``          the FSDP engine is registered for cuda and npu
process group "cpu:gloo"             verl builds "cpu:gloo,cpu:gloo", which torch refuses
``Tensor.pin_memory``                CPU offload of the reference model pins memory
``load_valuehead_model``             verl asks for flash attention in every critic
===================================  ==============================================================
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

from rlprobe.frameworks.imports import when_imported


class _CpuId(str):
    """A device id that is "cpu" to torch and 0 where verl formats or counts with it."""

    def __format__(self, spec: str) -> str:
        return "0"

    def __int__(self) -> int:
        return 0

    __index__ = __int__


def _device_module() -> types.ModuleType:
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
        lambda: _CpuId("cpu"): ("current_device",),
        lambda *args, **kwargs: "cpu": ("get_device_name",),
        lambda seed: torch.manual_seed(seed): ("manual_seed", "manual_seed_all"),
        lambda *args, **kwargs: torch.get_rng_state(): ("get_rng_state",),
        lambda state, *args, **kwargs: torch.set_rng_state(state): ("set_rng_state",),
    }
    for function, names in answers.items():
        for name in names:
            setattr(module, name, function)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as a verl platform."""

    _module: types.ModuleType | None = None

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        if CpuPlatform._module is None:
            CpuPlatform._module = _device_module()
        return CpuPlatform._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> _CpuId:
        return _CpuId("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        """There is one."""

    def synchronize(self, device_index: Any = None) -> None:
        """CPU kernels are synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: Any) -> None:
        """The CPU allocator has none."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps none."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No profiler."""

    def profiler_stop(self) -> None:
        """No profiler."""

    def ray_resource_name(self) -> str:
        # verl counts accelerators of the Ray cluster; the launch declares as many as it has ranks
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _process_group(module: types.ModuleType) -> None:
    original = module.initialize_global_process_group_ray
    module.initialize_global_process_group_ray = functools.partial(  # type: ignore[attr-defined]
        original, backend="cpu:gloo"
    )


def _value_head(module: types.ModuleType) -> None:
    def load_valuehead_model(
        local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            trust_remote_code=trust_remote_code,
            attn_implementation=getattr(model_config, "_attn_implementation", None) or "eager",
        )

    module.load_valuehead_model = load_valuehead_model  # type: ignore[attr-defined]


def _install() -> None:
    set_platform(CpuPlatform())
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    when_imported("verl.utils.distributed", _process_group)
    when_imported("verl.utils.model", _value_head)
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


_install()
