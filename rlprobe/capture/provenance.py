"""Which software and which hardware made the numbers: versions, environment, layout."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rlprobe import redaction
from rlprobe.capture import code, determinism
from rlprobe.capture.light.sketches import accumulation_floor
from rlprobe.capture.session import Session
from rlprobe.sketch import K

#: Distributions whose version is recorded where they are installed.
PACKAGES = (
    "torch",
    "numpy",
    "mindstudio-probe",
    "transformers",
    "verl",
    "slime",
    "megatron-core",
    "mindspeed",
    "torch-npu",
    "vllm",
    "vllm-ascend",
    "sglang",
    "flash-attn",
    "peft",
    "accelerate",
    "tensordict",
    "ray",
    "TransferQueue",
    "triton",
    "transformer-engine",
    "rlprobe",
)

#: Where CANN, the NPU's driver and firmware, and NVIDIA's kernel module say their versions.
_CANN = ("version.cfg", "version.info", "compiler/version.info")
_ASCEND = Path("/usr/local/Ascend")
_NVIDIA = Path("/proc/driver/nvidia/version")

#: Variables that change numbers, besides those of the determinism tables. A prefix ends in ``*``.
VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "MKL_*",
    "ONEDNN_*",
    "DNNL_*",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_*",
    "CUDNN_*",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVTE_*",
    "HCCL_*",
    "TASK_QUEUE_ENABLE",
    "CPU_AFFINITY_CONF",
    "LCCL_*",
    "ASCEND_LAUNCH_BLOCKING",
    "ATB_*",
    "CLOSE_MATMUL_K_SHIFT",
    "INF_NAN_MODE_ENABLE",
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "RLPROBE_FAULT",
)


def environment(session: Session) -> dict[str, Any]:
    """What ``parts/environment/{role}-rank{R}.json`` holds."""
    device = session.device
    return {
        "device": device,
        "device_name": _device_name(device),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "versions": versions(),
        "code": code.imported(),
        "variables": variables(),
        "threads": {
            "intra_op": torch.get_num_threads(),
            "inter_op": torch.get_num_interop_threads(),
            "cpus": os.cpu_count(),
        },
        "kernels": _kernels(device),
        "switches": switches(),
        "determinism": determinism.applied(),
        "sketch": {"k": K, "floor": accumulation_floor(_torch_device(device))},
    }


def versions() -> dict[str, str]:
    """Installed versions of the packages that matter, and of the device's own stack."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with the build's suffix, which metadata may lack
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    home = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    named = {
        "cann": [Path(home, name) for name in _CANN] if home else [],
        "ascend driver": [Path(_ASCEND, "driver/version.info")],
        "ascend firmware": [Path(_ASCEND, "firmware/version.info")],
        "nvidia driver": [_NVIDIA],
    }
    for name, files in named.items():
        version = _version_in(files)
        if version is not None:
            found[name] = version
    return found


def _version_in(files: Sequence[Path]) -> str | None:
    """The first line about a version in the first file that can be read; None without one."""
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        lines = [line for line in text.splitlines() if "ersion" in line]
        return lines[0].partition("=")[2].strip() or lines[0].strip() if lines else None
    return None


def variables() -> dict[str, str]:
    """Environment variables that change numbers and are set."""
    exact = {name for name in VARIABLES if not name.endswith("*")}
    exact.update(
        variable.name for table in determinism.TABLE.values() for variable in table.variables
    )
    prefixes = tuple(name[:-1] for name in VARIABLES if name.endswith("*"))
    return {
        name: redaction.value(value, name)
        for name, value in sorted(os.environ.items())
        if name in exact or name.startswith(prefixes)
    }


def switches() -> dict[str, Any]:
    """torch's global settings that change numbers."""
    cuda = torch.backends.cuda.matmul
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_tf32_matmul": cuda.allow_tf32,
        "allow_tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "allow_fp16_reduction": cuda.allow_fp16_reduced_precision_reduction,
        "allow_bf16_reduction": cuda.allow_bf16_reduced_precision_reduction,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "default_dtype": str(torch.get_default_dtype()),
        **_npu_switches(),
    }


#: What torch_npu's C side alone knows: option -> name in the record.
_NPU_OPTIONS = {
    "ALLOW_INTERNAL_FORMAT": "allow_internal_format",
    "jitCompile": "jit_compile",
    "ACL_PRECISION_MODE": "acl_precision_mode",
    "CUBE_MATH_TYPE": "cube_math_type",
}


def _npu_switches() -> dict[str, Any]:
    """HF32 (an NPU may round the factors of fp32 products), formats, compilation, precision mode.

    ``torch.npu.matmul``, ``torch.npu.conv`` and the options of torch_npu 2.13's ``npu_config``.
    """
    npu = getattr(torch, "npu", None)
    parts = {part: getattr(npu, part, None) for part in ("matmul", "conv")}
    found: dict[str, Any] = {
        f"allow_hf32_{part}": bool(getattr(switch, "allow_hf32"))  # noqa: B009  torch_npu's
        for part, switch in parts.items()
        if hasattr(switch, "allow_hf32")
    }
    for option, name in _NPU_OPTIONS.items():
        value = determinism.npu_option(option)
        if value is not None:
            found[name] = value
    return found


def _kernels(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found["cuda_capability"] = f"{major}.{minor}"
    return found


def _torch_device(device: str) -> torch.device:
    if device == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    npu = getattr(torch, "npu", None)
    if device == "npu" and npu is not None and npu.is_available():
        return torch.device("npu", npu.current_device())
    return torch.device("cpu")


def _device_name(device: str) -> str:
    if device == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    npu = getattr(torch, "npu", None)
    if device == "npu" and npu is not None and npu.is_available():
        return str(npu.get_device_name())
    return _cpu_name()


def _cpu_name() -> str:
    if sys.platform.startswith("linux"):
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            text = ""  # not every container shows it; the platform's own word follows
        for line in text.splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def layout(role: str, rank: int, world_size: int, given: dict[str, Any] | None) -> dict[str, Any]:
    """What ``parts/layout/{role}-rank{R}.json`` holds; sizes not given are 1."""
    sizes: dict[str, Any] = {"tp": 1, "pp": 1, "dp": world_size, "cp": 1, "ep": 1}
    return {
        "role": role,
        "rank": rank,
        "world_size": world_size,
        **sizes,
        "backend": None,
        **(given or {}),
    }
