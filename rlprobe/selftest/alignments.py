"""The alignments that faults are planted in: the CPU default, and what a fault ``needs`` of it.

Benchmark and target are this CPU with other kernels, so that every fault is looked for in real
round-off. Each combination of needs is an alignment of its own, with a collected run of its own
that all its faults share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlprobe.config import Alignment
from rlprobe.config.loading import parse
from rlprobe.errors import ConfigError

#: Kernels of the target; those of the benchmark are what torch chooses.
OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}

_MODELS = {
    "dense": "builtin:tiny-qwen2",
    "moe": "builtin:tiny-qwen2-moe",
    "llama": "builtin:tiny-llama",
}
_BRIEF = "builtin:tiny-qwen2-brief"
_CRITICS = {
    "dense": "builtin:tiny-qwen2-critic",
    "moe": "builtin:tiny-qwen2-critic",
    "llama": "builtin:tiny-llama-critic",
}
_BIASED_CRITIC = "builtin:tiny-qwen2-critic-bias"
_ESTIMATORS = {"ppo": "gae", "grpo": "grpo"}

#: Of a step.
_PROMPTS = 4
_OVERRIDES = (
    f"data.train_batch_size={_PROMPTS}",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "data.shuffle=false",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={_PROMPTS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.n=2",
    "critic.optim.lr=1e-3",
    f"critic.ppo_mini_batch_size={_PROMPTS}",
    "critic.ppo_micro_batch_size_per_gpu=2",
)

#: Prompts of an update, of every model that is trained.
_MINI_BATCHES = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
)

#: Rows of a call, of every model.
_MICRO_BATCHES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size_per_gpu",
)

#: Adapters on the actor, which is its own reference without them; merged for the CPU rollout.
_LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.target_modules=all-linear",
    "actor_rollout_ref.model.lora.merge=true",
)

#: What ``needs`` may say, and what each key accepts.
ACCEPTED: dict[str, str] = {
    "world_size": "a whole number from 1",
    "target_world_size": "a whole number from 1",
    "target_micro_batch": "a whole number from 1",
    "steps": "a whole number from 1",
    "captured": "a whole number from 1, at most steps",
    "perturbed": "0, or a whole number from 2",
    "updates": "1, 2 or 4",
    "lora": "true or false",
    "rejoin": "true or false",
    "algorithm": " or ".join(_ESTIMATORS),
    "temperature": "a number above 0",
    "precision": "fp32, bf16 or fp16",
    "model": " or ".join(_MODELS),
    "response_lengths": "equal or varied",
    "critic_head_bias": "true or false",
    "generation": "replay or compare",
    "environment": "variables of the target's processes",
}


def alignment(
    needs: Mapping[str, Any],
    *,
    store: str,
    results: str,
    name: str,
    tensors: bool = False,
    seed: int = 1,
    fault: str | None = None,
) -> Alignment:
    """The alignment that fulfils ``needs``.

    Args:
        needs: see :data:`ACCEPTED`.
        store: the store's directory.
        results: where results of all alignments go.
        name: this one's name.
        tensors: keep every tensor (msprobe's engine) instead of statistics and sketches.
        seed: of sampling, hence of the rollouts.
        fault: ``FILE:NAME`` to be planted in the target.

    Raises:
        ConfigError: a need is unknown or has a value that cannot be fulfilled.
    """
    check(needs)
    varied = needs.get("response_lengths") == "varied"
    kind = needs.get("model", "dense")
    if varied and kind != "dense":
        raise ConfigError("needs: response_lengths varied is there for the dense model only")
    biased = bool(needs.get("critic_head_bias", False))
    if biased and kind == "llama":
        raise ConfigError("needs: critic_head_bias is there for the critics of Qwen2 only")
    device = {
        "device": "cpu",
        "precision": needs.get("precision", "fp32"),
        "world_size": needs.get("world_size", 1),
    }
    steps = needs.get("steps", 1)
    prompts = _PROMPTS // needs.get("updates", 1)
    overrides = [
        f"algorithm.adv_estimator={_ESTIMATORS[needs.get('algorithm', 'ppo')]}",
        *_OVERRIDES,
        *([f"{name}={prompts}" for name in _MINI_BATCHES] if prompts != _PROMPTS else []),
        *(_LORA if needs.get("lora", False) else []),
        f"actor_rollout_ref.rollout.temperature={needs.get('temperature', 1.0)}",
        f"actor_rollout_ref.rollout.ignore_eos={str(not varied).lower()}",
        # ranks keep the rows they are given, and with them other numbers of tokens
        *(["trainer.balance_batch=false"] if varied else []),
    ]
    capture: dict[str, Any] = {"engine": "light", "token_sketch": True, "token_range": None}
    if tensors:
        capture = {"engine": "msprobe", "task": "tensor", "token_range": None}
    raw = {
        "name": name,
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {
            "path": _BRIEF if varied else _MODELS[kind],
            "critic_path": _BIASED_CRITIC if biased else _CRITICS[kind],
        },
        "data": {"train_files": "builtin:arithmetic"},
        "seed": seed,
        "steps": {"total": steps, "start": 0, "end": needs.get("captured", steps) - 1},
        "generation": needs.get("generation", "replay"),
        "overrides": overrides,
        "capture": capture,
        "benchmark": device,
        "target": {
            **device,
            "world_size": needs.get("target_world_size", device["world_size"]),
            "environment": {**_kernels(needs), **needs.get("environment", {})},
            "overrides": [
                f"{key}={needs['target_micro_batch']}"
                for key in (_MICRO_BATCHES if "target_micro_batch" in needs else ())
            ],
            "fault": fault,
        },
        "controls": {
            "repeat": True,
            "perturbed": needs.get("perturbed", 0),
            "rejoin": needs.get("rejoin", False),
        },
        "store": store,
        "results": results,
    }
    return parse(raw, f"alignment {name}")


def _kernels(needs: Mapping[str, Any]) -> dict[str, str]:
    """Kernels of the target. Adapters are drawn at the start, to the last bit by the kernels."""
    return {} if needs.get("lora", False) else OTHER_KERNELS


def check(needs: Mapping[str, Any]) -> None:
    """Refuse what no alignment can have.

    Raises:
        ConfigError: an unknown key, or a value that is not :data:`ACCEPTED`.
    """

    def refuse(key: str) -> None:
        raise ConfigError(f"needs: {key}: found {needs[key]!r}; accepted: {ACCEPTED[key]}")

    for key in needs:
        if key not in ACCEPTED:
            raise ConfigError(f"needs: {key!r} is unknown; accepted: {', '.join(ACCEPTED)}")
    for key in ("world_size", "target_world_size", "target_micro_batch", "steps", "captured"):
        value = needs.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(key)
    if needs.get("captured", 1) > needs.get("steps", 1):
        refuse("captured")
    perturbed = needs.get("perturbed", 0)
    if not isinstance(perturbed, int) or isinstance(perturbed, bool) or perturbed in (1, -1):
        refuse("perturbed")
    for key, known in (
        ("algorithm", tuple(_ESTIMATORS)),
        ("model", tuple(_MODELS)),
        ("precision", ("fp32", "bf16", "fp16")),
        ("response_lengths", ("equal", "varied")),
        ("critic_head_bias", (True, False)),
        ("updates", (1, 2, 4)),
        ("lora", (True, False)),
        ("rejoin", (True, False)),
        ("generation", ("replay", "compare")),
    ):
        if key in needs and needs[key] not in known:
            refuse(key)
    temperature = needs.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        refuse("temperature")
    if not temperature > 0:
        refuse("temperature")
    if not isinstance(needs.get("environment", {}), Mapping):
        refuse("environment")
