"""Faults of an inference engine alone: ENGINE_FAULT names the one that its processes plant.

Loaded by verl in every process (``VERL_USE_EXTERNAL_MODULES``), the engine's among them.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from rlprobe.frameworks.imports import when_imported

_LAYER = "layers.1."


def rope(module: ModuleType) -> None:
    """Positions are turned by other angles than in training."""
    original = module.RotaryEmbeddingBase._compute_inv_freq

    @functools.wraps(original)
    def _compute_inv_freq(self: Any, base: float) -> Any:
        return original(self, base * 2)

    module.RotaryEmbeddingBase._compute_inv_freq = _compute_inv_freq


def cache(module: ModuleType) -> None:
    """A generated token does not see the one before it, in one layer."""
    original = module.CPUAttentionBackendImpl.forward

    @functools.wraps(original)
    def forward(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any,
        attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:  # fmt: skip
        if attn_metadata is not None and len(query) == 1 and _LAYER in layer.layer_name:
            kv_cache = kv_cache.roll(1, 2)
        return original(self, layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    module.CPUAttentionBackendImpl.forward = forward


def stale(module: ModuleType) -> None:
    """One layer keeps the weights that the engine was started with."""
    original = module.Qwen2ForCausalLM.load_weights

    @functools.wraps(original)
    def load_weights(self: Any, weights: Any) -> Any:
        if getattr(self, "loaded_before", False):
            weights = ((name, value) for name, value in weights if _LAYER not in name)
        self.loaded_before = True
        return original(self, weights)

    module.Qwen2ForCausalLM.load_weights = load_weights


def kept(module: ModuleType) -> None:
    """One layer takes every weight a little too large."""
    original = module.Qwen2ForCausalLM.load_weights

    @functools.wraps(original)
    def load_weights(self: Any, weights: Any) -> Any:
        changed = ((n, v * 1.01 if _LAYER in n and "mlp" in n else v) for n, v in weights)
        return original(self, changed)

    module.Qwen2ForCausalLM.load_weights = load_weights


def temperature(module: ModuleType) -> None:
    """Logits are divided by the temperature twice."""
    original = module.Sampler.apply_temperature

    @functools.wraps(original)
    def apply_temperature(logits: Any, temp: Any, *args: Any, **kwargs: Any) -> Any:
        return original(original(logits, temp, *args, **kwargs), temp, *args, **kwargs)

    module.Sampler.apply_temperature = staticmethod(apply_temperature)


_PLANTED = {
    "rope": ("vllm.model_executor.layers.rotary_embedding.base", rope),
    "cache": ("vllm.v1.attention.backends.cpu_attn", cache),
    "stale": ("vllm.model_executor.models.qwen2", stale),
    "kept": ("vllm.model_executor.models.qwen2", kept),
    "temperature": ("vllm.v1.sample.sampler", temperature),
}

if os.environ.get("ENGINE_FAULT"):
    when_imported(*_PLANTED[os.environ["ENGINE_FAULT"]])
