"""verl's Megatron back end: whether it is chosen, its precisions, what it needs on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from rlprobe.errors import ConfigError
from rlprobe.frameworks.layout import Layout
from rlprobe.frameworks.verl.host import plan

if TYPE_CHECKING:
    from rlprobe.spec import RunSpec

#: The sections with a model each.
MODELS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")

#: What Megatron reads while it is imported.
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # what `attention_backend=local` stands for; Megatron stops where the caller's shell, or a model
    # that was made before in the same process, says otherwise
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
    "NVTE_UNFUSED_ATTN": "0",
}
#: Of Transformer Engine's alone, or fused for GPUs.
_PLAIN = (
    "attention_backend=local",
    "sequence_parallel=false",
    "persist_layer_norm=false",
    "moe_grouped_gemm=false",
    "moe_permute_fusion=false",
)
#: Layers of Megatron's own, weights through mbridge (see ``cpu/megatron.py``).
CPU_OVERRIDES = (
    *(f"{model}.megatron.vanilla_mbridge=true" for model in MODELS),
    *(f"{model}.megatron.sequence_parallel=false" for model in MODELS),
    *(
        f"++{model}.megatron.override_transformer_config.{option}"
        for model in MODELS
        for option in _PLAIN
    ),
)


def chosen(overrides: Iterable[str]) -> bool:
    """Whether verl's overrides choose Megatron for training."""
    config = plan.from_overrides(list(overrides))
    actor = (config.get("actor_rollout_ref") or {}).get("actor") or {}
    return "megatron" in (config.get("model_engine"), actor.get("strategy"))


def layout(actor: Mapping[str, Any], world_size: int) -> Layout:
    """Megatron's groups as the actor's section declares them."""
    declared = actor.get("megatron") or {}
    own = declared.get("override_transformer_config") or {}

    def size(name: str) -> int:
        return int(declared.get(f"{name}_parallel_size") or 1)

    return Layout(
        "megatron",
        world_size,
        tensor=size("tensor_model"),
        pipeline=size("pipeline_model"),
        chunks=size("virtual_pipeline_model"),
        context=size("context"),
        expert=size("expert_model"),
        # verl's default; one tensor-parallel rank has whole sequences
        sequence_parallel=bool(declared.get("sequence_parallel", True))
        and size("tensor_model") > 1,
        even=not any("pipeline" in key for key in own),
    )


def require_precision(spec: RunSpec) -> None:
    """Refuse what verl or Transformer Engine refuse once the job has waited for its devices.

    Raises:
        ConfigError: a precision that this back end has not on this device.
    """
    accepted = ("bf16", "fp16", "fp32") if spec.device == "cpu" else ("bf16", "fp16")
    if spec.precision in accepted:
        return
    asked = "controls.high_precision" if spec.role == "high_precision" else "precision"
    raise ConfigError(
        f"{spec.role}: {asked} asks for {spec.precision}, which verl's Megatron back end refuses "
        f"on {spec.device}; accepted: {', '.join(accepted)}"
        + ("; take controls.high_precision out" if spec.role == "high_precision" else "")
    )


def require_one_replay(spec: RunSpec, config: Mapping[str, Any]) -> None:
    """Refuse verl's own replay of routing where the benchmark's choices are replayed.

    Args:
        spec: the run.
        config: what its overrides say, nested.

    Raises:
        ConfigError: ``router_replay.mode`` of a model, or the rollout's routes, replay as well.
    """
    if spec.routing != "replay":
        return
    for model in MODELS:
        for backend in ("megatron", "veomni"):
            mode = plan.section(config, *model.split("."), backend, "router_replay").get("mode")
            if str(mode or "disabled") != "disabled":
                _one_replay(spec, f"{model}.{backend}.router_replay.mode={mode}", "disabled")
    rollout = plan.section(config, "actor_rollout_ref", "rollout")
    if rollout.get("enable_rollout_routing_replay"):
        option = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
        _one_replay(spec, f"{option}=true", "false")


def _one_replay(spec: RunSpec, found: str, accepted: str) -> NoReturn:
    raise ConfigError(
        f"{spec.role}: routing: replay sends tokens to the experts that the benchmark chose, and "
        f"{found} to those that the same run chose earlier; set that to {accepted}, or routing: own"
    )
