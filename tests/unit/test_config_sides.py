"""Sides that are not alike: a version for each, layouts that differ, worlds that do not divide."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe import frameworks
from rlprobe.cli import main
from rlprobe.config import Alignment
from rlprobe.errors import ConfigError, HookError
from rlprobe.frameworks import proof
from rlprobe.frameworks.layout import Layout, comparable
from rlprobe.runs.launch import session_of
from rlprobe.runs.plan import plan

_GRPO = "algorithm.adv_estimator=grpo"


def _raw(**changes: Any) -> dict[str, Any]:
    return {
        "name": "sides",
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"},
        "data": {"train_files": "builtin:arithmetic"},
        "overrides": [_GRPO],
        **changes,
    }


def _plan(**changes: Any) -> Any:
    return plan(Alignment.model_validate_json(json.dumps(_raw(**changes))), {})


def _megatron(*options: str) -> list[str]:
    return [f"actor_rollout_ref.actor.megatron.{option}" for option in options]


def test_a_sides_version_is_its_own_and_the_common_one_the_default() -> None:
    common = _plan()
    other = _plan(target={"framework_version": "0.8.0"})
    assert other["benchmark"].key == common["benchmark"].key
    assert other["target"].key != common["target"].key
    assert (other["benchmark"].framework_version, other["target"].framework_version) == (
        "0.9.1", "0.8.0",
    )  # fmt: skip
    # the controls of the benchmark's device are the benchmark's
    assert other["repeat"].framework_version == "0.9.1"
    named = _plan(benchmark={"framework_version": "0.9.1"}, target={"framework_version": "0.9.1"})
    assert named["target"].key == common["target"].key, "the same version said twice is no other"


def test_what_is_installed_is_held_against_its_own_sides_version(tmp_path: Path) -> None:
    runs = _plan(target={"framework_version": "0.8.0"})
    proof.require_version(session_of(runs["target"], tmp_path, tmp_path), "0.8.0")
    with pytest.raises(HookError, match=r"says verl 0\.8\.0, but 0\.9\.1"):
        proof.require_version(session_of(runs["target"], tmp_path, tmp_path), "0.9.1")


@pytest.mark.parametrize(
    ("options", "world_size", "said"),
    [
        (["tensor_model_parallel_size=4"], 2, "tensor 4 parallel ranks"),
        (
            ["tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"], 6,
            "tensor 2 x pipeline 2.*multiple of 4",
        ),
        (["expert_model_parallel_size=4"], 2, "expert parallel size 4"),
    ],
)  # fmt: skip
def test_a_world_that_the_groups_do_not_divide_is_refused_before_anything_waits(
    options: list[str], world_size: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"target: .*{said}"):
        _plan(target={
            "world_size": world_size,
            "overrides": ["model_engine=megatron", *_megatron(*options)],
        })  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "model", "said"),
    [
        (Layout("megatron", 8, tensor=8), {"num_attention_heads": 12}, "does not divide 12 heads"),
        (
            Layout("megatron", 6, tensor=6),
            {"num_attention_heads": 12, "num_key_value_heads": 4},
            "6 is neither a divisor nor a multiple of 4 key/value heads",
        ),
        (
            Layout("megatron", 4, pipeline=4, even=True), {"num_hidden_layers": 6},
            "pipeline 4 does not divide 6 layers",
        ),
        (
            Layout("megatron", 2, pipeline=2, chunks=3, even=True), {"num_hidden_layers": 28},
            "pipeline 2 x 3 chunks does not divide 28 layers",
        ),
        (Layout("megatron", 8, expert=8), {"n_routed_experts": 12}, "8 does not divide 12 experts"),
        (
            Layout("megatron", 4, tensor=4, expert=4),
            {"num_attention_heads": 6, "num_experts": 6},
            "6 heads; expert",
        ),
        (
            Layout("megatron", 8, tensor=8),
            {"num_attention_heads": 16, "num_key_value_heads": 2}, "",
        ),
        (Layout("megatron", 4, pipeline=4), {"num_hidden_layers": 6}, ""),
        (Layout("fsdp2", 8), {"num_attention_heads": 7, "num_hidden_layers": 3}, ""),
        (Layout("megatron", 8, tensor=8, expert=8), {}, ""),
    ],
)  # fmt: skip
def test_a_model_that_the_groups_do_not_divide_is_refused_too(
    layout: Layout, model: dict[str, int], said: str
) -> None:
    if not said:
        layout.require_model("target", model)
        return
    with pytest.raises(ConfigError) as refused:
        layout.require_model("target", model)
    assert str(refused.value).startswith("target: of the model, ") and said in str(refused.value)


def test_uneven_pipelines_are_the_users_own(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"num_hidden_layers": 7, "num_attention_heads": 4}')
    options = ["model_engine=megatron", *_megatron("pipeline_model_parallel_size=2")]
    side = {"world_size": 2, "overrides": options}
    with pytest.raises(ConfigError, match="pipeline 2 does not divide 7 layers"):
        _plan(target=side, model={"path": str(model)})
    own = "override_transformer_config.num_layers_in_first_pipeline_stage=4"
    options += [f"+{one}" for one in _megatron(own)]
    _plan(target=side, model={"path": str(model)})


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], Layout("megatron", 4)),
        (
            [
                "--tensor-model-parallel-size 2",
                "--pipeline-model-parallel-size 2",
                "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2",
                "--sequence-parallel",
            ],
            Layout("megatron", 4, tensor=2, pipeline=2, chunks=2, sequence_parallel=True),
        ),
        (["--expert-model-parallel-size=4"], Layout("megatron", 4, expert=4)),
    ],
)
def test_slimes_flags_are_a_layout_too(flags: list[str], expected: Layout) -> None:
    spec: Any = types.SimpleNamespace(overrides=tuple(flags), world_size=4)
    assert frameworks.get("slime").layout(spec) == expected


def test_equal_layouts_need_no_word() -> None:
    assert comparable(Layout("megatron", 4, tensor=2), Layout("megatron", 4, tensor=2), True) == []


@pytest.mark.parametrize(
    ("benchmark", "target", "said", "unsaid"),
    [
        (Layout("megatron", 4, tensor=4), Layout("megatron", 4, tensor=2), "over whole stages",
         "no coordinates"),
        (Layout("fsdp2", 2), Layout("megatron", 2, tensor=2, sequence_parallel=True),
         "over whole stages", "target's"),
        (Layout("megatron", 2, context=2), Layout("megatron", 2), "the benchmark's context",
         "target's"),
        (Layout("megatron", 2, expert=2), Layout("megatron", 2),
         "the benchmark's expert parallelism", "no coordinates"),
        (Layout("megatron", 4, tensor=2), Layout("megatron", 2, tensor=2),
         "2 against 1 data-parallel ranks", "Megatron against FSDP"),
        (Layout("megatron", 4, tensor=2), Layout("fsdp2", 1),
         "Megatron against FSDP", "tensor with data parallelism"),
        (Layout("fsdp2", 1), Layout("megatron", 2, tensor=2),
         "Megatron against FSDP", "data-parallel ranks"),
    ],
)  # fmt: skip
def test_unlike_layouts_say_what_can_be_compared(
    benchmark: Layout, target: Layout, said: str, unsaid: str
) -> None:
    text = " ".join(comparable(benchmark, target, True))
    assert str(benchmark) in text and str(target) in text
    assert said in text and unsaid not in text
    assert "not compared: single calls" in text
    without = " ".join(comparable(benchmark, target, False))
    assert "located by its stage" in without and "over whole stages" not in without


def test_config_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    side = {"world_size": 4}
    raw = _raw(
        overrides=[_GRPO, "model_engine=megatron", *_megatron("sequence_parallel=false")],
        benchmark=side | {"overrides": _megatron("tensor_model_parallel_size=4")},
        target=side
        | {
            "overrides": _megatron("tensor_model_parallel_size=2"),
            "framework_version": "0.9.0",
        },
    )
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert main(["config", "check", str(path)]) == 0
    text = capsys.readouterr().out
    assert (
        "benchmark megatron, 4 ranks (tensor 4); target megatron, 4 ranks (data 2, tensor 2)"
        in (text)
    )
    assert "verl 0.9.1 against 0.9.0" in text
