"""Is slime started with what a run needs, and nothing that contradicts it?"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rlprobe import stages
from rlprobe.capture.session import ENV, Session
from rlprobe.config import load
from rlprobe.errors import ConfigError, HookError
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.slime import flags as command
from rlprobe.frameworks.slime import hooks, launch, precision, start, versions
from rlprobe.runs import plan


@pytest.fixture
def specs(tmp_path: Path):
    """Runs of an alignment with slime, by role."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"text": "1"}\n')

    def make(*overrides: str, **more: Any) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "name": "t",
            "framework": "slime",
            "framework_version": "0.3.1",
            "model": {"path": str(model)},
            "data": {"train_files": [str(tmp_path / "prompts.jsonl")]},
            "steps": {"total": 3, "start": 0, "end": 1},
            "overrides": list(overrides),
            "benchmark": {"precision": "bf16"},
            "target": {"precision": "bf16"},
            **more,
        }
        path = tmp_path / "alignment.yaml"
        path.write_text(json.dumps(raw))
        return plan.plan(load(path), {})

    return make


PLACES = RunDirectories(scratch=Path("/scratch"), assets=Path("/assets"))


def flags(spec: Any) -> command.Flags:
    words = launch.FRAMEWORK.command(spec, PLACES)
    assert words[:3] == ["python", "-m", "rlprobe.frameworks.slime.start"]
    return command.parse(words[3:])


def test_a_collecting_run_saves_rollouts_and_a_replay_loads_them(specs: Any) -> None:
    made = specs("--use-kl-loss")
    collect, replay = flags(made["benchmark"]), flags(made["target"])
    assert collect["save-debug-rollout-data"] == ("/scratch/side/debug_rollouts/{rollout_id}.pt",)
    assert "load-debug-rollout-data" not in collect
    assert replay["load-debug-rollout-data"] == ("/scratch/side/replayed_rollouts/{rollout_id}.pt",)
    assert "save-debug-rollout-data" not in replay


def test_a_benchmark_may_load_rollouts_that_slime_recorded_elsewhere(specs: Any) -> None:
    loaded = {"precision": "bf16", "overrides": ["--load-debug-rollout-data /gpu/{rollout_id}.pt"]}
    made = specs(benchmark=loaded)
    assert flags(made["benchmark"])["load-debug-rollout-data"] == ("/gpu/{rollout_id}.pt",)
    assert "replayed" in flags(made["target"])["load-debug-rollout-data"][0]


def test_the_first_rollout_is_always_given(specs: Any) -> None:
    """A checkpoint of iteration 0 would make slime begin at rollout 1, and exit 0 with nothing."""
    found = flags(specs()["target"])
    assert (found["start-rollout-id"], found["num-rollout"]) == (("0",), ("3",))
    later = flags(specs("--start-rollout-id 40")["target"])
    assert (later["start-rollout-id"], later["num-rollout"]) == (("40",), ("43",))


@pytest.mark.parametrize("override", ["--num-rollout 5", "--hf-checkpoint /x", "--num-epoch 2"])
def test_what_the_alignment_says_may_not_be_said_again(specs: Any, override: str) -> None:
    with pytest.raises(ConfigError, match="is set by the alignment"):
        flags(specs(override)["benchmark"])


def test_users_flags_win_over_the_defaults_of_an_alignment(specs: Any) -> None:
    assert flags(specs("--seed 9")["benchmark"])["seed"] == ("9",)


def test_train_data_is_dumped_where_slime_gathers_it(specs: Any) -> None:
    assert "save-debug-train-data" not in flags(specs()["benchmark"])
    main = flags(specs(framework_version="main")["benchmark"])
    # v0.2.2 on the other side writes a file per rank under the same flag
    assert "{rollout_id}_{rank}" in main["save-debug-train-data"][0]


def test_precision(specs: Any) -> None:
    half = specs(benchmark={"precision": "fp16"}, controls={"high_precision": True})
    assert flags(half["benchmark"])["fp16"] == ()
    full = half["high_precision"]
    assert launch.FRAMEWORK.environment(full, PLACES)[precision.ENV] == "fp32"
    assert precision.ENV not in launch.FRAMEWORK.environment(half["benchmark"], PLACES)
    with pytest.raises(ConfigError, match="fp64 is not to be had"):
        flags(
            specs(benchmark={"precision": "fp32"}, controls={"high_precision": True})[
                "high_precision"
            ]
        )


@pytest.mark.parametrize(("asked", "bf16"), [("fp32", False), (None, True)])
def test_full_precision_takes_slimes_bf16_back(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, bf16: bool
) -> None:
    if asked:
        monkeypatch.setenv(precision.ENV, asked)
    else:
        monkeypatch.delenv(precision.ENV, raising=False)

    class Args:
        fp16 = False
        bf16 = False

    def set_default_megatron_args(args: Any) -> Any:
        args.bf16 = not args.fp16
        return args

    assert precision.set_defaults(set_default_megatron_args, (Args(),), {}).bf16 is bf16


def test_expected_stages_are_those_of_the_flags(specs: Any) -> None:
    made = specs("--use-kl-loss", "--global-batch-size 2", "--rollout-batch-size 4")
    for spec in made.values():
        assert spec.stages == (stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE)


def test_a_stage_asked_for_by_name_that_slime_skips_is_refused(specs: Any) -> None:
    wanted = {"stages": ["old_log_prob", "actor_train"]}
    with pytest.raises(ConfigError, match=r"old_log_prob does not run.*--keep-old-actor"):
        specs("--global-batch-size 4", "--rollout-batch-size 4", capture=wanted)


def test_builtin_models_do_not_exist(specs: Any) -> None:
    with pytest.raises(ConfigError, match="no builtin"):
        flags(specs(model={"path": "builtin:tiny-qwen2"})["benchmark"])


def test_world_size_and_nodes(specs: Any) -> None:
    side = {"precision": "bf16", "world_size": 16, "resources": {"nodes": 2}}
    found = flags(specs(benchmark=side)["benchmark"])
    assert (found["actor-num-nodes"], found["actor-num-gpus-per-node"]) == (("2",), ("8",))


def test_the_checkout_is_named_or_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.py.*RLPROBE_SLIME"):
        start.checkout({versions.CHECKOUT: str(tmp_path)})
    (tmp_path / "train.py").touch()
    assert start.checkout({versions.CHECKOUT: str(tmp_path)}) == tmp_path


@pytest.mark.parametrize(
    ("declared", "setup", "refused"),
    [
        ("0.2.2", 'version="0.2.3"', True),
        ("v0.3.1", "    version = '0.3.0.post1',", True),
        ("v0.2.2", 'version="0.2.2"', False),
        ("0.2.2.post1", 'version="0.2.2"', False),
        ("main", 'version="0.3.1"', False),
        ("0.2.2", "version=read()", False),
        (None, 'version="0.1.0"', False),
    ],
)
def test_a_checkout_of_another_version_is_refused_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    declared: str | None,
    setup: str,
    refused: bool,
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(7)")
    (tmp_path / "setup.py").write_text(f"setup(\n{setup}\n)\n")
    monkeypatch.setenv(versions.CHECKOUT, str(tmp_path))
    monkeypatch.setenv(ENV, "session.json")
    monkeypatch.setattr(
        Session, "load", lambda path: types.SimpleNamespace(framework_version=declared)
    )
    monkeypatch.setattr(start, "_start_ray", lambda address: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [])
    if refused:
        with pytest.raises(HookError, match=f"says slime {declared}, but {tmp_path} is 0"):
            start.main([])
        return
    with pytest.raises(SystemExit, match="7"):
        start.main([])
    unknown = "is not checked" in capsys.readouterr().err
    assert unknown == ("read" in setup and declared is not None)


def test_a_job_is_submitted_as_slimes_scripts_do(tmp_path: Path) -> None:
    environ = {"RLPROBE_CONFIG": "/x/session.json", "DUMP_ON": "1", "HOME": "/root"}
    words = start.submission("http://head:8265", tmp_path, ["--lr", "1"], environ)
    assert words[:3] == ["ray", "job", "submit"]
    sent = json.loads(words[words.index("--runtime-env-json") + 1])
    assert sent == {"env_vars": {"RLPROBE_CONFIG": "/x/session.json", "DUMP_ON": "1"}}
    assert words[-4:] == ["python3", str(tmp_path / "train.py"), "--lr", "1"]


def test_an_http_address_submits_and_returns_the_jobs_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    ray = tmp_path / "bin" / "ray"
    ray.parent.mkdir()
    ray.write_text('#!/bin/sh\necho "$@" > "$0.args"\nexit 7\n')
    ray.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ray.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    monkeypatch.setenv(versions.CHECKOUT, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/megatron")
    assert start.main(["--num-rollout", "2"]) == 7
    said = Path(f"{ray}.args").read_text()
    assert "--num-rollout 2" in said
    assert f"{tmp_path}{os.pathsep}/megatron" in said


@pytest.mark.parametrize("private", [True, False])
def test_full_precision_reaches_the_name_that_slime_calls(
    monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    """From v0.3 on slime calls a function of which the older name is a second name."""

    def defaults(args: Any) -> Any:
        args.bf16 = True
        return args

    module = types.ModuleType("slime.backends.megatron_utils.arguments")
    module.set_default_megatron_args = defaults  # type: ignore[attr-defined]
    if private:
        module._set_default_megatron_args = defaults  # type: ignore[attr-defined]
    monkeypatch.setenv(precision.ENV, "fp32")
    hooks._arguments(module)
    called = module._set_default_megatron_args if private else module.set_default_megatron_args
    assert called(types.SimpleNamespace()).bf16 is False


def test_a_slime_that_keeps_half_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    half = types.SimpleNamespace(bf16=True, fp16=False)
    monkeypatch.delenv(precision.ENV, raising=False)
    precision.require(half)
    monkeypatch.setenv(precision.ENV, "fp32")
    with pytest.raises(HookError, match="fp32 is wanted, but slime set bf16"):
        precision.require(half)
