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


def nucleus(module: ModuleType) -> None:
    """Log-probs are of the likeliest tokens alone, nine tenths of the whole, and nobody asked."""
    original = module.Sampler.apply_temperature

    @functools.wraps(original)
    def apply_temperature(logits: Any, temp: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(logits, temp, *args, **kwargs)
        shares, order = found.softmax(-1).sort(-1, descending=True)
        beyond = shares.cumsum(-1) - shares > 0.9
        return found.masked_fill(beyond.scatter(-1, order, beyond), float("-inf"))

    module.Sampler.apply_temperature = staticmethod(apply_temperature)


def behind(module: ModuleType) -> None:
    """A decoded token is given the distribution of the one before it."""
    original = module.Sampler.gather_logprobs
    before: list[Any] = []

    @functools.wraps(original)
    def gather_logprobs(logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        late = before[-1] if before and before[-1].shape == logprobs.shape else logprobs
        before[:] = [logprobs]
        return original(late, *args, **kwargs)

    module.Sampler.gather_logprobs = staticmethod(gather_logprobs)


def opening(module: ModuleType) -> None:
    """A token is put in front of every prompt."""
    original = module.AsyncLLM.generate

    @functools.wraps(original)
    def generate(self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        ids = prompt["prompt_token_ids"]
        return original(self, {**prompt, "prompt_token_ids": [1, *ids]}, *args, **kwargs)

    module.AsyncLLM.generate = generate


def prefix(module: ModuleType) -> None:
    """The first tokens of a prompt have the keys of others, as in a block that was kept too long,
    in one layer."""
    original = module.CPUAttentionBackendImpl.do_kv_cache_update

    @functools.wraps(original)
    def do_kv_cache_update(self: Any, layer: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if len(key) > 4 and _LAYER in layer.layer_name:
            key = key.clone()
            key[:2] = key[2:4]
        return original(self, layer, key, *args, **kwargs)

    module.CPUAttentionBackendImpl.do_kv_cache_update = do_kv_cache_update


def epsilon(module: ModuleType) -> None:
    """One layer's second norm has another epsilon."""
    original = module.Qwen2DecoderLayer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
        original(self, *args, prefix=prefix, **kwargs)
        if _LAYER in f"{prefix}.":
            self.post_attention_layernorm.variance_epsilon = 1e-2

    module.Qwen2DecoderLayer.__init__ = __init__


def _attention(change: Callable[[Any], None]) -> Callable[[ModuleType], None]:
    """Changes what one layer's attention was built with."""

    def plant(module: ModuleType) -> None:
        original = module.Qwen2Attention.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, prefix: str = "", **kwargs: Any) -> None:
            original(self, *args, prefix=prefix, **kwargs)
            if _LAYER in f"{prefix}.":
                change(self.attn.impl)

        module.Qwen2Attention.__init__ = __init__

    return plant


def scale(attention: Any) -> None:
    """Scores are a tenth larger."""
    attention.scale *= 1.1


def cap(attention: Any) -> None:
    """Scores are capped, which the model is not."""
    attention.logits_soft_cap = 0.5


def padding(module: ModuleType) -> None:
    """No fault: the vocabulary is padded to a multiple of another number."""
    original = module.pad_vocab_size

    @functools.wraps(original)
    def pad_vocab_size(vocab_size: int, pad_to: int = 64) -> int:
        return int(original(vocab_size, 3 * pad_to))

    vars(module)["pad_vocab_size"] = pad_vocab_size


_MODELS = ("vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen2_moe")
_PLANTED = {
    "rope": (("vllm.model_executor.layers.rotary_embedding.base",), rope),
    "cache": (("vllm.v1.attention.backends.cpu_attn",), cache),
    "adapter": (("verl.workers.rollout.vllm_rollout.utils",), adapter),
    "temperature": (("vllm.v1.sample.sampler",), temperature),
    "nucleus": (("vllm.v1.sample.sampler",), nucleus),
    "behind": (("vllm.v1.sample.sampler",), behind),
    "opening": (("vllm.v1.engine.async_llm",), opening),
    "prefix": (("vllm.v1.attention.backends.cpu_attn",), prefix),
    "epsilon": (("vllm.model_executor.models.qwen2",), epsilon),
    **{change.__name__: (_MODELS[:1], _attention(change)) for change in (scale, cap)},
    "padding": (("vllm.model_executor.layers.vocab_parallel_embedding",), padding),
    **{
        change.__name__: (_MODELS, _arriving(change))
        for change in (stale, half, kept, split, rounded, experts)
    },
}

if os.environ.get("ENGINE_FAULT"):
    _modules, _plant = _PLANTED[os.environ["ENGINE_FAULT"]]
    for _module in _modules:
        when_imported(_module, _plant)
