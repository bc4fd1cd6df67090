"""Where engines are hooked, registered for the moment an engine is imported.

Imported at interpreter start: neither torch nor an engine is imported before.
"""

from __future__ import annotations

from types import ModuleType

from rlprobe.frameworks.imports import when_imported

#: vLLM's two model runners; vLLM-Ascend's are their subclasses.
VLLM = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
VLLM_SAMPLER = "vllm.v1.sample.sampler"
SGLANG = "sglang.srt.model_executor.model_runner"


def register() -> None:
    """Wrap the model runners of whichever engine this process imports."""
    for module in VLLM:
        when_imported(module, _vllm)
    when_imported(VLLM_SAMPLER, _vllm_sampler)
    when_imported(SGLANG, _sglang)


def _vllm(module: ModuleType) -> None:
    from rlprobe.frameworks.engines import vllm

    vllm.patch(module)


def _vllm_sampler(module: ModuleType) -> None:
    from rlprobe.frameworks.engines import vllm

    vllm.patch_sampler(module)


def _sglang(module: ModuleType) -> None:
    from rlprobe.frameworks.engines import sglang

    sglang.patch(module)
