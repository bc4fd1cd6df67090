"""verl's Megatron engine on a CPU.

Loaded by verl in every process of a run whose back end is Megatron (``VERL_USE_EXTERNAL_MODULES=
rlprobe.frameworks.verl,rlprobe.frameworks.verl.cpu,rlprobe.frameworks.verl.cpu.megatron``). No file
of verl, mbridge or Megatron is edited. What each part is for:

=================================  ================================================================
``cuda.enable``                    Megatron asks for the current CUDA device throughout
layers without Transformer Engine  mbridge asks for its layers; Megatron has plain ones
names of plain norms               there a norm is a module; in Transformer Engine's layers it is a
                                   part of the projection behind it, the one name mbridge knows
names of plain experts             there each expert is a module; grouped ones are one module with a
                                   weight for each, and mbridge knows these only
routers                            megatron-core 0.16 looks for a name that it takes from
                                   Transformer Engine, and defines nothing without
counts of rows as numpy            experts' dispatcher makes them so of a GPU's tensors only, and
                                   torch's collective takes no others
value heads                        mbridge looks for a critic's under the language model's name, as
                                   Megatron itself saves it, and not under Hugging Face's (its bias
                                   has no place in Megatron's)
attention over packed samples      Megatron's plain attention takes one sequence a row
no moves of weights                device and host memory are one; without a distributed optimizer
                                   verl 0.9.1's own mover fails on a buffer that is not there
fp32                               verl's configuration accepts bf16 and fp16 only, for Transformer
                                   Engine's attention; Megatron's plain layers compute in any
=================================  ================================================================

Written against verl 0.9.1, mbridge 0.15.1 and megatron-core 0.16.1.
"""

from __future__ import annotations

import functools
import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlprobe.frameworks.imports import when_imported
from rlprobe.frameworks.verl.cpu import cuda

#: A weight of an expert that is a module: its number on this rank, and the rest of its name.
_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
#: A value head in a Hugging Face model for token classification.
_SCORE = "score.weight"
#: A plain norm's parameter, and what Transformer Engine's layers call it.
_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def _plain_layers(module: types.ModuleType) -> None:
    block_spec = module.get_gpt_decoder_block_spec

    @functools.wraps(block_spec)
    def plain_block_spec(config: Any, use_transformer_engine: bool = False, **kwargs: Any) -> Any:
        return block_spec(config, use_transformer_engine=False, **kwargs)

    module.get_gpt_decoder_block_spec = plain_block_spec  # type: ignore[attr-defined]


def _plain_norms(module: types.ModuleType) -> None:
    bridge = module.Bridge
    to_hugging_face = bridge._weight_name_mapping_mcore_to_hf

    @functools.wraps(to_hugging_face)
    def with_plain_norms(self: Any, name: str) -> Any:
        for plain, fused in _NORMS.items():
            if plain in name:
                try:
                    return to_hugging_face(self, name.replace(plain, fused))
                except NotImplementedError:
                    break  # in front of experts the norm stands alone in either kind of layer
        return to_hugging_face(self, name)

    bridge._weight_name_mapping_mcore_to_hf = with_plain_norms


def _plain_experts(module: types.ModuleType) -> None:
    bridge = module.Bridge
    to_global = bridge._weight_name_mapping_mcore_local_to_global

    @functools.wraps(to_global)
    def with_plain_experts(self: Any, model: Any, consider_ep: bool = True) -> dict[str, str]:
        first = 0
        if consider_ep and self.mpu.ep_size > 1:
            first = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank
        return {
            local: _EXPERT.sub(lambda m: f"experts.{m[2]}{int(m[1]) + first}", name)
            for local, name in to_global(self, model, consider_ep).items()
        }

    bridge._weight_name_mapping_mcore_local_to_global = with_plain_experts


def _plain_routers(module: types.ModuleType) -> None:
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # type: ignore[attr-defined]


def _counts_as_numpy(module: types.ModuleType) -> None:
    move = module.maybe_move_tensor_to_cpu

    @functools.wraps(move)
    def moved(tensor: Any, as_numpy: bool = False, **kwargs: Any) -> Any:
        found = move(tensor, as_numpy=as_numpy, **kwargs)
        return found.numpy() if as_numpy and isinstance(found, Tensor) else found

    module.maybe_move_tensor_to_cpu = moved  # type: ignore[attr-defined]


def _value_heads(module: types.ModuleType) -> None:
    reader = module.SafeTensorIO
    load = reader.load_some_hf_weight

    @functools.wraps(load)
    def load_with_value_head(self: Any, names: list[str]) -> dict[str, Tensor]:
        saved = set(self.load_hf_weight_names())
        if "lm_head.weight" not in names or "lm_head.weight" in saved or _SCORE not in saved:
            return load(self, names)
        found = load(self, [_SCORE if name == "lm_head.weight" else name for name in names])
        found["lm_head.weight"] = found.pop(_SCORE)
        return found

    reader.load_some_hf_weight = load_with_value_head


def _attention_over_samples(module: types.ModuleType) -> None:
    attention = module.DotProductAttention
    attention.forward = _sample_by_sample(attention.forward)


def _sample_by_sample(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def wrapper(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        # verl's mask says which positions are used. The unused ones are behind the used, where
        # causal attention, which Megatron makes of no mask at all, does not look.
        if packed_seq_params is None:
            return forward(self, query, key, value, None, *args, **kwargs)
        parts = []
        for start, end in _samples(packed_seq_params, len(query)):
            # (tokens, heads, channels) of one sample, as a batch of one
            one = [tensor[start:end].unsqueeze(1) for tensor in (query, key, value)]
            parts.append(forward(self, *one, None, *args, **kwargs))
        return torch.cat(parts)

    return wrapper


def _samples(packed: Any, tokens: int) -> list[tuple[int, int]]:
    """Where each sample of a packed row begins and ends, its padding included."""
    padded = packed.cu_seqlens_q_padded
    bounds = packed.cu_seqlens_q if padded is None else padded
    found = [int(bound) for bound in bounds.tolist()]
    if found[-1] < tokens:
        found.append(tokens)
    return [(a, b) for a, b in itertools.pairwise(found) if b > a]


def _no_moves(module: types.ModuleType) -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    for name in (
        "load_megatron_model_to_gpu",
        "offload_megatron_model_to_cpu",
        "load_megatron_optimizer",
        "offload_megatron_optimizer",
    ):
        setattr(module, name, nothing)


def _any_precision(module: types.ModuleType) -> None:
    configuration = module.McoreEngineConfig
    validate = configuration.__post_init__

    @functools.wraps(validate)
    def validate_any(self: Any) -> None:
        wanted = self.dtype
        if wanted != "float32":
            return validate(self)
        # whatever else it validates is validated; verl's fields are written once only
        object.__setattr__(self, "dtype", "bfloat16")
        try:
            validate(self)
        finally:
            object.__setattr__(self, "dtype", wanted)
        return None

    configuration.__post_init__ = validate_any


def _install() -> None:
    cuda.enable()
    when_imported("mbridge.core.llm_bridge", _plain_layers)
    when_imported("mbridge.core.bridge", _plain_norms)
    when_imported("mbridge.core.bridge", _plain_experts)
    when_imported("megatron.core.transformer.moe.moe_utils", _plain_routers)
    when_imported("megatron.core.transformer.moe.token_dispatcher", _counts_as_numpy)
    when_imported("mbridge.core.safetensor_io", _value_heads)
    when_imported("megatron.core.transformer.dot_product_attention", _attention_over_samples)
    when_imported("verl.utils.megatron_utils", _no_moves)
    when_imported("verl.workers.config.engine", _any_precision)


_install()
