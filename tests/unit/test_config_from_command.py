"""`rlprobe config from-command`: a training script of one's own becomes an alignment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe import frameworks, stages
from rlprobe.cli import main
from rlprobe.config import load
from rlprobe.errors import ConfigError
from rlprobe.frameworks import RunDirectories
from rlprobe.runs.plan import plan

_VERL = """#!/usr/bin/env bash
set -x
cd {root}
export VLLM_USE_V1=1 HCCL_BUFFSIZE=512 NCCL_DEBUG=WARN WANDB_API_KEY=0123456789abcdef0123
export CUDA_VISIBLE_DEVICES=0,1 PYTHONPATH=recipe:$PYTHONPATH HCCL_DETERMINISTIC=true
MODEL=models/qwen
python3 -m {entry} {hydra} \\
    algorithm.adv_estimator=grpo \\
    data.train_files={root}/a.parquet \\
    data.val_files="[{root}/a.parquet]" \\
    data.train_batch_size=64 \\
    data.seed=7 \\
    custom_reward_function.path=reward.py \\
    custom_reward_function.name=score \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.name=vllm \\
    critic.model.path=$MODEL \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 \\
    trainer.nnodes=2 \\
    trainer.save_freq=20 \\
    trainer.use_v1=True \\
    trainer.total_epochs=15 $@ > train.log 2>&1
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models/qwen").mkdir(parents=True)
    (tmp_path / "models/qwen/config.json").write_text("{}")
    (tmp_path / "models/qwen/model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "reward.py").write_text("def score(*a, **k): return 1.0\n")
    (tmp_path / "recipe").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _script(site: Path, entry: str = "verl.trainer.main_ppo", hydra: str = "") -> Path:
    path = site / "run_qwen.sh"
    path.write_text(_VERL.format(root=site, entry=entry, hydra=hydra))
    return path


@pytest.fixture
def made(site: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    def call(*words: str) -> tuple[Path, dict[str, Any]]:
        status = main(
            ["config", "from-command", "--json", "said.json", "-o", "mine.yaml",
             "--framework-version", "0.9.1", *words]
        )  # fmt: skip
        assert status == 0
        said: dict[str, Any] = json.loads((site / "said.json").read_text())
        return site / "mine.yaml", said

    return call


def test_a_plain_verl_script_becomes_an_alignment(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    file, said = made(str(_script(site)), "algorithm.gamma=0.9")
    assert not (site / "train.log").exists(), "the script was read, not run"
    alignment = load(file)
    assert alignment.name == "run_qwen"
    assert (alignment.model.path, alignment.model.critic_path) == (f"{site}/models/qwen", None)
    assert alignment.data.reward_function == f"{site}/reward.py:score"
    assert alignment.seed == 7
    sides = {"benchmark": alignment.benchmark, "target": alignment.target}
    assert {name: side.device for name, side in sides.items()} == {
        "benchmark": "cuda", "target": "npu",
    }  # fmt: skip
    for side in sides.values():
        assert (side.world_size, side.resources.nodes, side.precision) == (16, 2, "bf16")
        assert side.environment["VLLM_USE_V1"] == "1"
        assert side.environment["PYTHONPATH"].split(":")[0] == f"{site}/recipe"
    assert "NCCL_DEBUG" in sides["benchmark"].environment
    assert "NCCL_DEBUG" not in sides["target"].environment
    assert "HCCL_BUFFSIZE" in sides["target"].environment
    assert "HCCL_BUFFSIZE" not in sides["benchmark"].environment
    assert "algorithm.gamma=0.9" in alignment.overrides
    assert "trainer.use_v1=True" in alignment.overrides
    # nothing is lost in silence
    text = file.read_text()
    for part in ("trainer.save_freq=20 (an alignment saves no checkpoint)",
                 "trainer.total_epochs=15 (steps.total ends a run)",
                 "WANDB_API_KEY (looks like a secret",
                 "CUDA_VISIBLE_DEVICES (set anew",
                 "HCCL_DETERMINISTIC=true (deterministic: true sets it",
                 "grpo trains no critic",
                 "custom_reward_function.path=reward.py -> data.reward_function"):  # fmt: skip
        assert part in text, part
    assert "0123456789abcdef0123" not in text
    assert "0123456789abcdef0123" not in json.dumps(said)
    assert said["overruled"]["actor_rollout_ref.rollout.name"] == ["vllm", "rlprobe_replay"]
    assert any(word.startswith("trainer.resume_mode=") for word in said["added"])
    assert main(["config", "check", str(file)]) == 0
    assert "actor_compute_log_prob" in capsys.readouterr().out


def test_every_option_of_a_run_is_the_commands_or_listed(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    """What the run starts with, against the file's own account of it."""
    file, said = made(str(_script(site)))
    framework = frameworks.get("verl")
    spec = plan(load(file), {})["target"]
    started = framework.options(
        framework.command(spec, RunDirectories(Path("/RUN"), Path("/STORE/a")))
    )
    added = framework.options([word.removesuffix(" (replays)") for word in said["added"]])
    kept = framework.options(list(spec.overrides))
    moved = framework.options(list(said["moved"])) | framework.options(list(said["left_out"]))
    unexplained = [
        option for option in started
        if option not in added and option not in kept and option not in moved
    ]  # fmt: skip
    assert unexplained == []
    for option, value in kept.items():
        if started[option] != value:
            assert option in said["overruled"]


def test_a_recipes_entry_point_and_configuration(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    hydra = "--config-path=../../conf --config-name='dapo_trainer.yaml'"
    (site / "recipe/dapo").mkdir()
    (site / "recipe/dapo/main_dapo.py").touch()
    (site / "conf").mkdir()
    (site / "conf/dapo_trainer.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nalgorithm: {rollout_correction: {bypass_mode: true}}\n"
    )
    file, _ = made(str(_script(site, "recipe.dapo.main_dapo", hydra)))
    alignment = load(file)
    assert alignment.entry_point is not None
    assert alignment.entry_point.module == "recipe.dapo.main_dapo"
    specs = plan(alignment, {})
    command = frameworks.get("verl").command(
        specs["benchmark"], RunDirectories(Path("/r"), Path("/a"))
    )
    assert command[:5] == [
        "python", "-m", "recipe.dapo.main_dapo", f"--config-path={site}/conf",
        "--config-name=dapo_trainer",
    ]  # fmt: skip
    # the configuration's own words count: this one runs no log-prob stage
    assert stages.LOG_PROB not in specs["target"].stages
    # Hydra takes "+key" only where a configuration lacks it, which nobody knows of this one
    assert not [word for word in command if word.startswith("+") and not word.startswith("++")]
    before = specs["target"].key
    (site / "conf/dapo_trainer.yaml").write_text("defaults: [ppo_trainer, _self_]\n")
    assert plan(alignment, {})["target"].key != before


@pytest.mark.parametrize(
    ("hydra", "entry"),
    [
        pytest.param("--config-path=./config --config-name=ppo_trainer", None,
                     marks=pytest.mark.long),
        ("--config-path=config --config-name='ppo_megatron_trainer.yaml'",
         {"config_name": "ppo_megatron_trainer"}),
        pytest.param("--config-name ppo_trainer", None, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_verls_own_configurations_are_not_looked_for_here(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]], hydra: str, entry: Any
) -> None:
    """As verl's own examples write them: relative to its module."""
    file, said = made(str(_script(site, hydra=hydra)))
    assert said["alignment"].get("entry_point") == entry
    assert main(["config", "check", str(file)]) == 0


def test_a_configuration_beside_a_module_that_is_not_here_is_noted(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    file, said = made(str(_script(site, "recipe.far.main", "--config-path=conf")))
    assert any("--config-path=conf is relative to recipe.far.main" in n for n in said["notes"])
    assert load(file).entry_point is not None


def test_a_script_of_ones_own_is_read_for_its_hydra_configuration(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    (site / "conf").mkdir()
    (site / "conf/mine.yaml").write_text("actor_rollout_ref: {actor: {use_kl_loss: true}}\n")
    (site / "main.py").write_text(
        "import hydra\n@hydra.main(config_path='conf', config_name='mine')\ndef main(c): ...\n"
    )
    file, _ = made(
        "--", "python3", "main.py", "actor_rollout_ref.model.path=models/qwen",
        "algorithm.adv_estimator=grpo", "data.train_files=a.parquet", "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    specs = plan(load(file), {})
    assert specs["target"].stages[0] == stages.REFERENCE
    assert specs["benchmark"].device == specs["target"].device == "cpu"
    key = specs["benchmark"].key
    (site / "main.py").write_text((site / "main.py").read_text() + "# edited\n")
    assert plan(load(file), {})["benchmark"].key != key


def test_a_megatron_configuration_by_its_name(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    file, _ = made(str(_script(site, hydra="--config-name ppo_megatron_trainer")))
    specs = plan(load(file), {})
    assert frameworks.get("verl").layout(specs["target"]).backend == "megatron"


_SLIME = """
source {root}/models/args.sh
CKPT=(--hf-checkpoint {root}/models/qwen --ref-load {root}/models/qwen --save {root}/out)
RUNTIME_ENV_JSON="{{\\"env_vars\\": {{\\"PYTHONPATH\\": \\"/root/Megatron-LM\\", \\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\"}}}}"
ray start --head --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${{RUNTIME_ENV_JSON}}" \\
   -- python3 {root}/{train} --actor-num-nodes 1 --actor-num-gpus-per-node 4 "${{ARGS[@]}}" \\
   "${{CKPT[@]}}" --prompt-data {root}/a.parquet --num-rollout 3000 --use-wandb \\
   --global-batch-size 8 --rollout-batch-size 8 --n-samples-per-prompt 2
"""  # noqa: E501


def test_a_slime_script_becomes_an_alignment(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    (site / "models/args.sh").write_text("ARGS=(--num-layers 2 --hidden-size 8)\n")
    (site / "train.py").touch()
    script = site / "run.sh"
    script.write_text(_SLIME.format(root=site, train="train.py"))
    file, said = made(str(script))
    alignment = load(file)
    assert alignment.framework == "slime"
    assert alignment.target.world_size == 4
    assert alignment.target.environment["RLPROBE_SLIME"] == str(site)
    assert alignment.target.environment["PYTHONPATH"] == "/root/Megatron-LM"
    assert "--num-layers 2" in alignment.overrides
    assert said["left_out"]["--num-rollout 3000"] == "steps.total ends a run"
    # each option has one place
    assert not {option.removeprefix("--") for option in said["overruled"]} & {
        word.split()[0].removeprefix("--") for word in (*said["left_out"], *said["moved"])
    }
    assert main(["config", "check", str(file)]) == 0


def test_slimes_asynchronous_training_is_refused(site: Path, capsys: Any) -> None:
    script = site / "run.sh"
    script.write_text(_SLIME.format(root=site, train="train_async.py"))
    assert main(["config", "from-command", "--framework-version", "v0.2.2", str(script)]) == 2
    assert "train_async.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "python", "-m", "verl.trainer.main_ppo", "a=1"], "no actor_rollout_ref.model.path"),
        (["--", "python", "-m", "verl.trainer.main_ppo", "a=1", "two", "words"], "'two'"),
        (["--", "python", "-m", "verl.trainer.main_ppo", "--multirun", "a=1"], "--multirun"),
        (["--", "echo"], "no training"),
        (["absent.sh"], "absent.sh"),
        (["absent.slurm"], "absent.slurm: no such file"),
        ([], "no command given"),
    ],
)
def test_what_makes_no_alignment_is_said(
    site: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "from-command", "--framework-version", "0.9.1", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_asks_for_something_says_so(site: Path, capsys: Any) -> None:
    script = site / "run.sh"
    script.write_text(
        '[ -n "$BASE_FOLDER" ] || { echo "BASE_FOLDER is not set"; exit 3; }\n'
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=models/qwen\n"
    )
    assert main(["config", "from-command", "--framework-version", "0.9.1", str(script)]) == 2
    said = capsys.readouterr().err
    assert "ended with status 3, and wrote last: BASE_FOLDER is not set" in said


@pytest.mark.parametrize("package", ["verl", "recipe", "empty"])
def test_a_checkout_that_nobody_installed_is_found_by_the_runs(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]], package: str
) -> None:
    """``cd verl && python -m verl.trainer.main_ppo`` trains with the files of that directory."""
    checkout = site / "checkout"
    (checkout / "verl").mkdir(parents=True)
    if package == "verl":
        (checkout / "verl/__init__.py").touch()
    (checkout / "recipe/dapo/config").mkdir(parents=True)
    entry = "recipe.dapo.main" if package == "recipe" else "verl.trainer.main_ppo"
    if package == "recipe":
        (checkout / "recipe/dapo/main.py").write_text(
            '@hydra.main(config_path="config", config_name="dapo")\ndef main(c): ...\n'
        )
        (checkout / "recipe/dapo/config/dapo.yaml").write_text("algorithm: {adv_estimator: grpo}\n")
    script = site / "run.sh"
    script.write_text(
        f"cd {checkout}\nexport PYTHONPATH=lib:$PYTHONPATH\nmkdir -p lib\n"
        f"python3 -m {entry} actor_rollout_ref.model.path={site}/models/qwen "
        f"data.train_files={site}/a.parquet trainer.n_gpus_per_node=8\n"
    )
    _, said = made(str(script))
    found = said["alignment"]["target"]["environment"]["PYTHONPATH"].split(":")
    assert (found[0] == str(checkout)) is (package != "empty")
    noted = any("where it is called" in note for note in said["notes"])
    assert noted is (package != "empty")
    # the recipe's own configuration says which algorithm it is
    assert any("critic" in note for note in said["notes"]) is (package != "recipe")


def test_a_script_of_any_name_in_any_wrapping_is_read(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    script = _script(site).rename(site / "grpo.slurm")
    for words in (
        ["grpo.slurm"],
        ["--", "sbatch", "-N2", "grpo.slurm"],
        ["bash", "-x", "grpo.slurm"],
    ):
        file, said = made(*words)
        assert said["alignment"]["name"] == "grpo"
        assert said["alignment"]["target"]["world_size"] == 16
        file.unlink()
    assert script.exists()


def test_an_option_that_is_given_again_counts_as_it_is_given_last(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    """What a user adds to a script comes after the script's own."""
    _, said = made(
        str(_script(site)), "trainer.nnodes=1", "data.seed=8", "data.train_batch_size=32",
        "trainer.save_freq=5", "data.train_batch_size=32",
    )  # fmt: skip
    raw = said["alignment"]
    assert (raw["seed"], raw["target"]["world_size"]) == (8, 8)
    assert [word for word in raw["overrides"] if "train_batch_size" in word] == [
        "data.train_batch_size=32"
    ]
    for word in ("trainer.nnodes=2", "data.seed=7", "data.train_batch_size=64"):
        assert said["left_out"][word] == "given again, with another value"
        assert word not in said["moved"]


def test_secrets_among_the_options_are_left_out(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    file, said = made(
        str(_script(site)), "+trainer.wandb_api_key=abcdef0123456789abcdef",
        "+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345",
    )  # fmt: skip
    text = file.read_text() + json.dumps(said)
    assert "abcdef0123456789abcdef" not in text
    assert "hf_abc" not in text
    assert "#   +trainer.wandb_api_key=[redacted] (looks like a secret" in text
    # what is told about secrets is itself no secret
    assert "#   WANDB_API_KEY (looks like a secret; set it where rlprobe is started)" in text


def test_a_model_on_a_hub_is_pointed_out(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    file, said = made(
        "--", "python3", "-m", "verl.trainer.main_ppo", "data.train_files=a.parquet",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B", "algorithm.adv_estimator=gae",
    )  # fmt: skip
    notes = " ".join(said["notes"])
    assert "Qwen/Qwen2.5-7B is not on this machine" in notes
    assert "model.critic_path" in notes
    assert yaml.safe_load(file.read_text())["model"]["path"] == "Qwen/Qwen2.5-7B"
    assert all(note in file.read_text() for note in said["notes"])
    assert yaml.safe_load(file.read_text())["target"]["world_size"] == 8, "verl's default"


def test_an_older_file_is_not_written_over(site: Path, capsys: Any) -> None:
    (site / "mine.yaml").write_text("mine\n")
    assert main(["config", "from-command", "-o", "mine.yaml", str(_script(site))]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (site / "mine.yaml").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"module": "a.b", "script": "x.py"}, "one of them"),
        ({}, "empty"),
        ({"script": "absent.py"}, "absent.py does not exist"),
        ({"script": "reward.py", "config_path": "models"}, "no YAML file"),
    ],
)
def test_a_wrong_entry_point_is_refused(site: Path, entry: dict[str, str], said: str) -> None:
    raw = {
        "name": "n", "framework": "verl", "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"}, "data": {"train_files": "builtin:arithmetic"},
        "entry_point": entry,
    }  # fmt: skip
    file = site / "x.yaml"
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=said):
        plan(load(file), {})


_PLAIN = "verl.trainer.main_ppo actor_rollout_ref.model.path=models/qwen data.train_files=a.parquet"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"python3 -m {_PLAIN}\r\n", "Windows line ends"),
        ("python3 -m verl.trainer.main_ppo\r\n", "Windows line ends"),
        # whatever bash would have said of it, this is why
        (f"set -xeuo pipefail\r\npython3 -m {_PLAIN}\r\n", "Windows line ends"),
        (f"f() {{\r\n  python3 -m {_PLAIN}\r\n}}\r\nf\r\n", "Windows line ends"),
        (f"if true; then\r\npython3 -m {_PLAIN}\r\nfi\r\n", "Windows line ends"),
        (f"set -o pipefail\r\npython3 -m {_PLAIN}\r\n".replace("\r\n", "\n\r"), "Windows line"),
        (f"A=(a.b=1\r)\npython3 -m {_PLAIN} ${{A[@]}}\n", "Windows line ends"),
        (f"#!/bin/bash\r\nset -x\r\npython3 -m {_PLAIN} \\\r\n", "Windows line ends"),
        (f"\ufeffpython3 -m {_PLAIN}\n", "begins with a byte order mark"),
        (f"\ufeff#!/bin/bash\npython3 -m {_PLAIN}\n", "begins with a byte order mark"),
        (f"torchrun --nproc_per_node=2 -m {_PLAIN}\n", "write python -m verl.trainer.main_ppo"),
        (f"accelerate launch -m {_PLAIN}\n", "write python -m verl.trainer.main_ppo"),
        (f"python -m torch.distributed.run -m {_PLAIN}\n", "write python -m verl.trainer"),
    ],
)
def test_a_script_that_bash_or_verl_would_stumble_over_is_refused(
    site: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (site / "run.sh").write_bytes(text.encode())
    assert main(["config", "from-command", "-o", "mine.yaml", "run.sh"]) == 2
    assert said in capsys.readouterr().err
    assert not (site / "mine.yaml").exists()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_script_in_utf_16_is_said_to_be(
    site: Path, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    (site / "run.sh").write_bytes(f"python3 -m {_PLAIN}\n".encode(encoding))
    assert main(["config", "from-command", "-o", "mine.yaml", "run.sh"]) == 2
    assert "UTF-16" in capsys.readouterr().err


def test_windows_line_ends_of_what_a_script_sources_are_said(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "common.sh").write_bytes(f"start() {{\r\n  python3 -m {_PLAIN}\r\n}}\r\n".encode())
    (site / "run.sh").write_text("set -e\n. ./common.sh\nstart\n")
    assert main(["config", "from-command", "-o", "mine.yaml", "run.sh"]) == 2
    said = capsys.readouterr().err
    assert "Something that the script reads has Windows line ends" in said


def test_line_ends_of_what_is_only_written_are_nobodys_matter(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]]
) -> None:
    (site / "run.sh").write_bytes(f"cat <<X >y\nabc\r\nX\npython3 -m {_PLAIN}\n".encode())
    assert made("run.sh")[0].exists()


@pytest.mark.parametrize("value", ["$NOBODY_SET_IT", '""', "${A[3]}", "$1"])
def test_an_option_without_a_value_is_said_to_be(
    site: Path, made: Callable[..., tuple[Path, dict[str, Any]]], value: str
) -> None:
    (site / "run.sh").write_text(
        f"python3 -m {_PLAIN} data.train_batch_size={value} data.max_prompt_length=8\n"
    )
    file, said = made("run.sh")
    empty = [note for note in said["notes"] if "gives it no value" in note]
    assert [note.partition(":")[0] for note in empty] == ["data.train_batch_size"]
    assert empty[0] in file.read_text()
