"""A user's own shell script, recorded and adopted: real verl under Ray."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe import stages
from rlprobe.config import load
from rlprobe.frameworks import RunDirectories
from rlprobe.rollouts import hdf5
from rlprobe.runs.plan import plan
from tests.contract.conftest import RUN
from tests.contract.runs import ROOT, Runs

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.contract]


@pytest.fixture(scope="module")
def script(made: Runs) -> Path:
    """A script as people write them: exports, an array, arguments passed on, a log of its own."""
    directory = made.work / "own"
    directory.mkdir(exist_ok=True)
    places = RunDirectories(directory, made.work / "store/assets")
    words = [
        word for word in made.framework.command(made.spec, places)[3:]
        if not word.startswith(("hydra.run.dir", "trainer.total_training_steps"))
    ]  # fmt: skip
    environment = made.framework.environment(made.spec, places)
    environment["VERL_USE_EXTERNAL_MODULES"] = "rlprobe.frameworks.verl.cpu"
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    path = directory / "run_ppo.sh"
    path.write_text(
        "\n".join(
            [
                "#!/usr/bin/env bash", "set -xeuo pipefail", *exports,
                f'cd "{directory}"', "ARGS=(", *(f"  {shlex.quote(word)}" for word in words), ")",
                f'{sys.executable} -m verl.trainer.main_ppo "${{ARGS[@]}}" "$@" 2>&1 | tee log',
            ]
        ) + "\n"
    )  # fmt: skip
    return path


@pytest.mark.cell("way in", "own script: rlprobe exec -- bash run.sh", RUN)
def test_it_is_recorded_as_it_is(made: Runs, script: Path) -> None:
    dump = script.parent / "recorded"
    done = subprocess.run(
        [sys.executable, "-m", "rlprobe", "exec", "-o", str(dump), "--json", str(dump) + ".json",
         "--", "bash", str(script), "trainer.total_training_steps=2"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    said = json.loads(Path(str(dump) + ".json").read_text())
    assert said["stages"] == {
        stage: 1 for stage in sorted(stages.TRAINING_STAGES) if stage != stages.TEACHER
    }
    assert not list(dump.glob("*/step1")), "the first step alone"
    assert list(hdf5.steps(dump / "rollouts")) == [0]
    assert json.loads((dump / "configurations.json").read_text())["algorithm"]


@pytest.mark.cell("way in", "own script: an alignment of it, composed by verl's Hydra", RUN)
def test_its_alignment_is_a_configuration_of_verls(made: Runs, script: Path) -> None:
    import hydra

    file = script.parent / "own.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "rlprobe", "config", "from-command", "-o", str(file), str(script)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    specs = plan(load(file), {})
    directories = RunDirectories(script.parent / "run", made.work / "store/assets")
    for role, engine in (("benchmark", "rlprobe_cpu"), ("target", "rlprobe_replay")):
        words = made.framework.command(specs[role], directories)
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            composed = hydra.compose("ppo_trainer", words[3:])
        assert composed.actor_rollout_ref.rollout.name == engine
        assert composed.trainer.total_training_steps == 1
        assert composed.actor_rollout_ref.actor.use_kl_loss
