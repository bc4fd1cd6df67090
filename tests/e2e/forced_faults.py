"""Faults of the target's inference engine alone, and changes that are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlprobe.selftest import benign, fault

STAGE = "forced_generation"
#: One alignment for all: a temperature of its own, so that one applied twice shows.
NEEDS = {"generation": "compare", "temperature": 0.7}
ATTENTION = "model.layers.1.self_attn"


@benign(needs=NEEDS)
def other_kernels(site: Any) -> Iterator[None]:
    """The target's kernels are others as they are."""
    yield


@fault(stage=STAGE, module="model.rotary_emb", cause=("position", "hyperparameter"), needs=NEEDS)
def angles(site: Any) -> Iterator[None]:
    rotary = site.model.model.rotary_emb
    kept = rotary.inv_freq.clone()
    rotary.inv_freq.copy_(kept * 0.5)
    yield
    rotary.inv_freq.copy_(kept)


@fault(stage=STAGE, module=ATTENTION, cause="unknown", needs=NEEDS)
def cache_off_by_one(site: Any) -> Iterator[None]:
    """Decoding reads the keys of one layer a place too far on."""

    def shift(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs.get("past_key_values")
        if cache is not None and kwargs["hidden_states"].shape[1] == 1:
            layer = cache.layers[1]
            layer.keys = layer.keys.roll(1, 2)

    attention = site.model.get_submodule(ATTENTION)
    handle = attention.register_forward_pre_hook(shift, with_kwargs=True)
    yield
    handle.remove()


@fault(stage=STAGE, cause="sampling_semantics", needs=NEEDS)
def temperature_twice(site: Any) -> Iterator[None]:
    # imports verl, which the process of a side has and a test of its own need not
    from rlprobe.frameworks.verl.engine import cpu_rollout

    once = cpu_rollout._distribution

    def twice(logits: Any, sampling: Any) -> Any:
        return once(logits / sampling["temperature"], sampling)

    cpu_rollout._distribution = twice
    yield
    cpu_rollout._distribution = once


@fault(
    stage=STAGE,
    module=f"{ATTENTION}.q_proj",
    cause="weights",
    verdict="not_comparable",
    needs=NEEDS,
)
def other_weights(site: Any) -> Iterator[None]:
    """The engine kept what it was started with, in one layer."""
    weight = site.model.get_submodule(f"{ATTENTION}.q_proj").weight
    kept = weight.data.clone()
    weight.data.mul_(1.001)
    yield
    weight.data.copy_(kept)
