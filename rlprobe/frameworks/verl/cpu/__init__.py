"""A CPU as VeRL's device: the few places where verl takes an accelerator for granted.

Loaded by verl itself in every process (``VERL_USE_EXTERNAL_MODULES=rlprobe.frameworks.verl,
rlprobe.frameworks.verl.cpu``). No file of verl is edited. What each part is for:

===================================  ==============================================================
:mod:`.platform`                     verl's platform registry knows accelerators only
:mod:`.older`                        verl 0.8 and before have no registry
``VERL_ENGINE_DEVICE=cuda``          the FSDP engine is registered for cuda and npu
process group "cpu:gloo"             verl builds "cpu:gloo,cpu:gloo", which torch refuses
``Tensor.pin_memory``                CPU offload of the reference model pins memory
FSDP1's weights from rank 0          verl has FSDP1 send them to all ranks, which it refuses to do
                                     with parameters on a CPU, though gloo sends them
``load_valuehead_model``             verl asks for flash attention in every critic
``attention_utils``                  verl 0.9.0 and before import flash attention to drop padding
===================================  ==============================================================
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import types
from typing import Any

import torch

from rlprobe.frameworks.imports import when_imported


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


def _padding(module: types.ModuleType) -> None:
    """Functions in torch alone, which verl itself has for NPUs, in place of flash attention's."""
    if hasattr(module, "_fallback_pad_input") or importlib.util.find_spec("flash_attn"):
        return

    def functions() -> tuple[Any, ...]:
        own = importlib.import_module("verl.utils.npu_flash_attn_utils")
        return own.index_first_axis, own.pad_input, own.rearrange, own.unpad_input

    module._get_attention_functions = functions  # type: ignore[attr-defined]


def _from_rank_0(module: types.ModuleType) -> None:
    module._check_module_states_for_sync_module_states = lambda states: None  # type: ignore[attr-defined]


def _install() -> None:
    registry = importlib.util.find_spec("verl.plugin") is not None
    importlib.import_module(f"{__name__}.{'platform' if registry else 'older'}").install()
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    when_imported("verl.utils.distributed", _process_group)
    when_imported("verl.utils.model", _value_head)
    when_imported("verl.utils.attention_utils", _padding)
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
        when_imported("torch.distributed.fsdp._init_utils", _from_rank_0)


_install()
