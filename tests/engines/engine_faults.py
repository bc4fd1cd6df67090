"""Faults of an inference engine alone: ENGINE_FAULT names the one that its processes plant.

Loaded by verl in every process (``VERL_USE_EXTERNAL_MODULES``), the engine's among them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
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


#: Changes the weights that arrive: whether they are the first, a name and its value; None: dropped.
Change = Callable[[bool, str, Any], Any]


def _arriving(change: Change) -> Callable[[ModuleType], None]:
    def plant(module: ModuleType) -> None:
        cls = next(c for name, c in vars(module).items() if name.endswith("ForCausalLM"))
        original = cls.load_weights

        @functools.wraps(original)
        def load_weights(self: Any, weights: Any) -> Any:
            first = not getattr(self, "loaded_before", False)
            self.loaded_before = True
            changed = ((name, change(first, name, value)) for name, value in weights)
            return original(self, ((n, v) for n, v in changed if v is not None))

        cls.load_weights = load_weights

    return plant


def stale(first: bool, name: str, value: Any) -> Any:
    """The engine keeps the weights that it was started with."""
    return value if first else None


def half(first: bool, name: str, value: Any) -> Any:
    """One layer keeps the weights that the engine was started with."""
    return None if _LAYER in name and not first else value


def kept(first: bool, name: str, value: Any) -> Any:
    """One layer takes some weights a little too large."""
    return value * 1.01 if _LAYER in name and "mlp" in name else value


def split(first: bool, name: str, value: Any) -> Any:
    """The heads of one layer's queries are dealt out in another order."""
    return value.roll(32, 0) if _LAYER in name and "q_proj.weight" in name else value


def rounded(first: bool, name: str, value: Any) -> Any:
    """One layer is sent in a shorter format."""
    return value.bfloat16().to(value.dtype) if _LAYER in name and "proj.weight" in name else value


def experts(first: bool, name: str, value: Any) -> Any:
    """The experts of one layer are dealt out from the second on."""
    return value.roll(1, 0) if _LAYER in name and ".mlp.experts." in name else value


def adapter(module: ModuleType) -> None:
    """The adapters of one layer stay those that came first."""
    cls = module.vLLMColocateWorkerExtension
    original = cls._update_weights
    first: dict[str, Any] = {}

    @functools.wraps(original)
    def _update_weights(self: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        kept = [
            (name, first.setdefault(name, value.clone()) if _kept(name) else value)
            for name, value in weights
        ]
        return original(self, kept, *args, **kwargs)

    def _kept(name: str) -> bool:
        return ".lora_" in name and _LAYER in name

    cls._update_weights = _update_weights


def temperature(module: ModuleType) -> None:
    """Logits are divided by the temperature twice."""
    original = module.Sampler.apply_temperature

    @functools.wraps(original)
    def apply_temperature(logits: Any, temp: Any, *args: Any, **kwargs: Any) -> Any:
        return original(original(logits, temp, *args, **kwargs), temp, *args, **kwargs)

    module.Sampler.apply_temperature = staticmethod(apply_temperature)


_MODELS = ("vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen2_moe")
_PLANTED = {
    "rope": (("vllm.model_executor.layers.rotary_embedding.base",), rope),
    "cache": (("vllm.v1.attention.backends.cpu_attn",), cache),
    "adapter": (("verl.workers.rollout.vllm_rollout.utils",), adapter),
    "temperature": (("vllm.v1.sample.sampler",), temperature),
    **{
        change.__name__: (_MODELS, _arriving(change))
        for change in (stale, half, kept, split, rounded, experts)
    },
}

if os.environ.get("ENGINE_FAULT"):
    _modules, _plant = _PLANTED[os.environ["ENGINE_FAULT"]]
    for _module in _modules:
        when_imported(_module, _plant)
