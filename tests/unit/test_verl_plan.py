"""Which stages does a verl configuration run, and what command line does a run get?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlprobe import frameworks, stages
from rlprobe.config import Alignment
from rlprobe.errors import ConfigError
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.verl.host import plan
from rlprobe.runs.plan import plan as plan_runs
from rlprobe.spec import RunSpec

PPO = (
    stages.GENERATE,
    stages.LOG_PROB,
    stages.VALUES,
    stages.CRITIC_UPDATE,
    stages.ACTOR_UPDATE,
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], PPO),
        (["algorithm.adv_estimator=grpo"], (stages.GENERATE, stages.LOG_PROB, stages.ACTOR_UPDATE)),
        (
            ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"],
            (stages.GENERATE, stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE),
        ),
        (["algorithm.use_kl_in_reward=True"], (stages.GENERATE, stages.REFERENCE, *PPO[1:])),
        (["algorithm.adv_estimator=grpo", "critic.enable=true"], PPO),
        (["critic.enable=false"], (stages.GENERATE, stages.LOG_PROB, stages.ACTOR_UPDATE)),
        (
            ["critic.enable=false", "+algorithm.rollout_correction.bypass_mode=true"],
            (stages.GENERATE, stages.ACTOR_UPDATE),
        ),
    ],
)
def test_stages_follow_the_algorithm(overrides: list[str], expected: tuple[str, ...]) -> None:
    assert plan.stages_of(plan.from_overrides(overrides)) == expected


def test_the_last_override_of_a_key_counts() -> None:
    config = plan.from_overrides(["a.b=1", "+a.b=2", "a.c=[x,y]", "~d", "e.f='text'"])
    assert config == {"a": {"b": 2, "c": ["x", "y"]}, "e": {"f": "text"}}


def _specs(**changes: Any) -> dict[str, RunSpec]:
    raw: dict[str, Any] = {
        "name": "t",
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2", "critic_path": "builtin:tiny-qwen2-critic"},
        "data": {"train_files": "builtin:arithmetic"},
        "overrides": ["algorithm.adv_estimator=gae"],
        **changes,
    }
    return plan_runs(Alignment.model_validate_json(json.dumps(raw)), {})


def _command(spec: RunSpec) -> dict[str, str]:
    words = frameworks.get("verl").command(
        spec, RunDirectories(Path("/s/scratch/x"), Path("/s/assets"))
    )
    assert words[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    pairs = [word.lstrip("+").partition("=")[::2] for word in words[3:]]
    names = [name for name, _ in pairs]
    assert len(names) == len(set(names)), "Hydra refuses a key given twice"
    return dict(pairs)


def test_only_the_benchmark_generates() -> None:
    specs = _specs()
    assert stages.GENERATE in specs["benchmark"].stages
    for role in ("target", "repeat"):
        assert specs[role].stages == PPO[1:]
    assert _command(specs["benchmark"])["actor_rollout_ref.rollout.name"] != "rlprobe_replay"
    assert _command(specs["target"])["actor_rollout_ref.rollout.name"] == "rlprobe_replay"


def test_generation_layers_are_not_expected_of_an_engine_whose_layers_are_not_captured() -> None:
    specs = _specs(
        benchmark={
            "device": "cuda",
            "overrides": ["actor_rollout_ref.rollout.name=vllm"],
        }
    )
    assert stages.GENERATE not in specs["benchmark"].stages


def test_users_overrides_win_over_defaults_but_not_over_what_a_run_needs() -> None:
    specs = _specs(
        overrides=[
            "algorithm.adv_estimator=gae",
            "trainer.use_v1=true",
            "trainer.total_training_steps=99",
        ],
        steps={"total": 2, "start": 0, "end": 1},
    )
    command = _command(specs["benchmark"])
    assert command["trainer.use_v1"] == "true"
    assert command["trainer.total_training_steps"] == "2"


def test_precision_reaches_every_model() -> None:
    command = _command(_specs(target={"precision": "bf16"})["target"])
    for section in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"):
        assert "param_dtype:bf16" in command[f"{section}.mixed_precision"]
        assert command[f"{section}.model_dtype"] == "fp32"
    assert command["actor_rollout_ref.rollout.dtype"] == "bfloat16"


def test_an_accelerator_gets_none_of_the_cpus_settings() -> None:
    spec = _specs(target={"device": "npu", "world_size": 8})["target"]
    command = _command(spec)
    environment = frameworks.get("verl").environment(
        spec, RunDirectories(Path("/s/scratch/x"), Path("/s/assets"))
    )
    # what keeps Ray to this node, and nothing of what it has: that is found out there
    ray = {name: value for name, value in command.items() if "ray_kwargs" in name}
    assert ray == {
        "ray_kwargs.ray_init._node_ip_address": "127.0.0.1",
        "ray_kwargs.ray_init.include_dashboard": "false",
    }
    assert command["trainer.n_gpus_per_node"] == "8"
    assert "VERL_ENGINE_DEVICE" not in environment
    assert environment["VERL_USE_EXTERNAL_MODULES"] == "rlprobe.frameworks.verl"


def test_ranks_that_do_not_fit_the_nodes_are_refused() -> None:
    spec = _specs(target={"device": "npu", "world_size": 3, "resources": {"nodes": 2}})["target"]
    with pytest.raises(ConfigError, match="world_size 3"):
        _command(spec)


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'algorithm\.adv_estimator' is not .*KEY=VALUE"):
        _specs(overrides=["algorithm.adv_estimator"])


def test_megatron_on_a_cpu_gets_its_own_layers_and_no_option_of_fsdps() -> None:
    specs = _specs(overrides=["algorithm.adv_estimator=gae", "model_engine=megatron"])
    command = _command(specs["benchmark"])
    assert not [key for key in command if "fsdp" in key or key.endswith("strategy")]
    for model in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        assert command[f"{model}.megatron.dtype"] == "float32"
        assert command[f"{model}.megatron.vanilla_mbridge"] == "true"
    environment = frameworks.get("verl").environment(
        specs["benchmark"], RunDirectories(Path("/s/x"), Path("/s/assets"))
    )
    modules = environment["VERL_USE_EXTERNAL_MODULES"].split(",")
    assert modules[-1] == "rlprobe.frameworks.verl.cpu.megatron"
    plain = frameworks.get("verl").environment(
        _specs()["benchmark"], RunDirectories(Path("/s/x"), Path("/s/assets"))
    )
    assert "megatron" not in plain["VERL_USE_EXTERNAL_MODULES"]


@pytest.mark.parametrize(
    ("device", "precision", "controls", "said"),
    [
        ("cuda", "fp32", {}, "benchmark: precision asks for fp32"),
        ("npu", "bf16", {"high_precision": True}, "high_precision: controls.high_precision asks"),
        ("cpu", "fp32", {"high_precision": True}, "asks for fp64"),
    ],
)
def test_a_precision_that_megatron_refuses_is_refused_before_anything_waits(
    device: str, precision: str, controls: dict[str, Any], said: str
) -> None:
    side = {"device": device, "precision": precision}
    with pytest.raises(ConfigError, match=said):
        _specs(
            overrides=["algorithm.adv_estimator=grpo", "model_engine=megatron"],
            benchmark=side,
            target=side,
            controls=controls,
        )


_ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (f"{_ACTOR}.megatron.router_replay.mode=R2", "router_replay.mode=R2 .* disabled"),
        ("critic.megatron.router_replay.mode=R3", "critic.megatron.router_replay.mode=R3"),
        (f"+{_ACTOR}.veomni.router_replay.mode=R3", "veomni.router_replay.mode=R3"),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "enable_rollout_routing_replay=true .* false",
        ),
    ],
)
def test_two_replays_of_routing_are_refused_before_anything_waits(override: str, said: str) -> None:
    given = ["algorithm.adv_estimator=grpo", "model_engine=megatron", override]
    with pytest.raises(ConfigError, match=said):
        _specs(overrides=given, routing="replay")
    _specs(overrides=given)


def test_a_replay_of_verls_that_is_off_stands_beside_that_of_routing() -> None:
    off = f"{_ACTOR}.megatron.router_replay.mode=disabled"
    _specs(
        overrides=["algorithm.adv_estimator=grpo", "model_engine=megatron", off], routing="replay"
    )


@pytest.mark.parametrize(
    ("engine", "needed"),
    [
        ("vllm", ["enable_prefix_caching=false"]),
        ("sglang", ["+actor_rollout_ref.rollout.engine_kwargs.sglang.disable_radix_cache=true"]),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_inference_layers_of_engines_are_recorded_where_they_are_asked_for(
    device: str, engine: str, needed: list[str]
) -> None:
    framework = frameworks.get("verl")
    chosen = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.rollout.name={engine}"]
    side = {"device": device, "precision": "bf16"}
    sides: dict[str, Any] = {"benchmark": side, "target": side}
    with pytest.raises(
        ConfigError, match=r"capture.token_range on .*enforce_eager=true"
    ) as refused:
        _specs(overrides=chosen, capture={"token_range": [0, 2]}, **sides)
    assert all(setting in str(refused.value) for setting in needed)
    said = framework.inference_not_recorded(_specs(overrides=chosen, **sides)["benchmark"])
    assert said is not None
    assert engine in said and "token_range" in said
    agreed = [
        *chosen,
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.enable_prefix_caching=false",
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.disable_radix_cache=true",
    ]
    run = _specs(overrides=agreed, capture={"token_range": [0, 2]}, **sides)["benchmark"]
    assert stages.GENERATE in run.stages


def test_what_cannot_be_recorded_is_refused_or_said_to_be_missing() -> None:
    framework = frameworks.get("verl")
    other = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf"]
    with pytest.raises(ConfigError, match=r"token_range: found \[0, 2\], but .*hf.*collector"):
        _specs(overrides=other, capture={"token_range": [0, 2]})
    vllm = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm"]
    asked = _specs(overrides=vllm, capture={"token_range": None})["benchmark"]
    assert framework.inference_not_recorded(asked) is None
    own = _specs(capture={"token_range": [0, 2]})["benchmark"]
    assert framework.inference_not_recorded(own) is None
    assert stages.GENERATE in own.stages, "the CPU's own engine is recorded"


def test_a_cpu_run_on_two_nodes_is_not_tied_to_the_loopback() -> None:
    places = RunDirectories(Path("/s/x"), Path("/s/assets"))
    framework = frameworks.get("verl")
    two = _specs(target={"world_size": 2, "resources": {"nodes": 2}})["target"]
    found = framework.environment(two, places)
    assert "GLOO_SOCKET_IFNAME" not in found
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in found
    assert framework.environment(_specs()["target"], places)["GLOO_SOCKET_IFNAME"] == "lo"
