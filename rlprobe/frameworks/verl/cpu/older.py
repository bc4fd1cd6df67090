"""The CPU for versions of verl without a registry of platforms (0.8 and before).

They ask :mod:`verl.utils.device` what there is, and many modules keep what they imported of it.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from rlprobe.frameworks.imports import when_imported
from rlprobe.frameworks.verl.cpu.device import device_module

_ANSWERS: dict[str, Any] = {
    "get_torch_device": device_module,
    "get_nccl_backend": lambda: "gloo",
    # verl counts accelerators of the Ray cluster; the launch declares as many as it has ranks
    "get_resource_name": lambda: "GPU",
}


def install() -> None:
    """Answer for a CPU what verl asks of an accelerator, in this process."""
    import verl.utils.device as device

    for name, answer in _ANSWERS.items():
        original = getattr(device, name, None)
        if original is None:
            continue
        for module in _of_verl():
            if getattr(module, name, None) is original:
                setattr(module, name, answer)
    when_imported("verl.workers.engine.base", _register_cpu)
    when_imported("verl.single_controller.ray.base", _place_cpu)


def _of_verl() -> list[types.ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "verl"]


def _register_cpu(module: types.ModuleType) -> None:
    """An engine for CUDA is one for the CPU: it is torch's FSDP."""
    original = module.EngineRegistry.register.__func__

    def register(cls: type, model_type: str, backend: Any, device: Any = "cuda") -> Any:
        devices = device if isinstance(device, list) else [device]
        if "cuda" in devices:
            devices = [*devices, "cpu"]
        return original(cls, model_type, backend, devices)

    module.EngineRegistry.register = classmethod(register)


def _place_cpu(module: types.ModuleType) -> None:
    """A worker takes one of the accelerators that the launch declares, and no resource ``cpu``."""
    original = module.RayResourcePool.get_placement_groups

    def get_placement_groups(
        self: Any, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> Any:
        return original(self, strategy, name, "cuda" if device_name == "cpu" else device_name)

    module.RayResourcePool.get_placement_groups = get_placement_groups
