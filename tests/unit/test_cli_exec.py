"""`rlprobe exec`: a user's own script, recorded without a word about what to record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.errors import ConfigError
from rlprobe.frameworks import forward, plain, switch

pytestmark = pytest.mark.slow

_RECORDS = """
import json, os, pathlib
root = pathlib.Path(json.load(open(os.environ["RLPROBE_CONFIG"]))["records_to"])
for rank in range(2):
    place = root / "actor_update" / "step0" / f"rank{rank}"
    place.mkdir(parents=True)
    (place / "dump.json").write_text("{}")
"""


def _exec(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlprobe", "exec", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_is_recorded_without_a_collector(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(_RECORDS)
    script = tmp_path / "run.sh"
    script.write_text(f'cd /\n"{sys.executable}" {tmp_path}/trainer.py "$@"\n')
    done = _exec(tmp_path, "--json", "said.json", "--", "bash", str(script))
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == {"status": 0, "directory": "rlprobe_dump", "stages": {"actor_update": 2}}
    assert "recorded actor_update: 2 dumps" in done.stderr


def test_a_command_in_which_nothing_was_recorded_fails_and_says_why(tmp_path: Path) -> None:
    done = _exec(tmp_path, "--", "bash", "-c", "true")
    assert done.returncode == 1
    assert "nothing was recorded" in done.stderr
    assert "rlprobe installed" in done.stderr


@pytest.mark.parametrize("status", [0, 7])
def test_an_attempt_that_recorded_nothing_is_not_in_the_way_of_the_next(
    tmp_path: Path, status: int
) -> None:
    _exec(tmp_path, "--", "bash", "-c", f"exit {status}")
    assert not (tmp_path / "rlprobe_dump").exists()
    (tmp_path / "trainer.py").write_text(_RECORDS)
    assert _exec(tmp_path, "--", sys.executable, f"{tmp_path}/trainer.py").returncode == 0


def test_what_an_interrupted_command_began_is_said(tmp_path: Path) -> None:
    """It may be half a recording, so it is not taken away; the next attempt asks for its place."""
    begun = "mkdir -p rlprobe_dump/actor_update/step0; exit 130"
    done = _exec(tmp_path, "--", "bash", "-c", begun)
    assert done.returncode == 130
    assert "before a stage was recorded whole; what it began is in rlprobe_dump" in done.stderr


def test_what_a_script_leaves_in_the_background_is_recorded_all_the_same(tmp_path: Path) -> None:
    """``nohup python … &``: the script ends, and the training has only begun."""
    (tmp_path / "trainer.py").write_text(f"import time; time.sleep(3)\n{_RECORDS}")
    script = tmp_path / "run.sh"
    script.write_text(f"nohup {sys.executable} {tmp_path}/trainer.py > log 2>&1 &\n")
    done = _exec(tmp_path, "--", "bash", str(script))
    assert done.returncode == 0, done.stderr
    assert "left 1 process with the hooks on (" in done.stderr
    deadline = time.monotonic() + 60
    while not plain.recorded(tmp_path / "rlprobe_dump"):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.2)


def test_the_commands_own_status_stays(tmp_path: Path) -> None:
    assert _exec(tmp_path, "--output", "a", "--", "bash", "-c", "exit 7").returncode == 7
    assert _exec(tmp_path, "--output", "b", "--", "bash", "-c", "kill -9 $$").returncode == 137


def test_an_older_recording_is_not_mixed_with_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "rlprobe_dump" / "actor_update").mkdir(parents=True)
    done = _exec(tmp_path, "--", "bash", "-c", "touch ran")
    assert done.returncode == 2
    assert "is there already" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_output_belongs_to_a_recording_without_a_collector(tmp_path: Path) -> None:
    collector = tmp_path / "c.yaml"
    collector.write_text("precision_collector: {msprobe: true}\n")
    done = _exec(tmp_path, "--collector", str(collector), "-o", "x", "--", "true")
    assert done.returncode == 2
    assert "--output" in done.stderr


def test_a_sigterm_reaches_the_command(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "rlprobe", "exec", "--", "bash", "-c", "touch begun; sleep 60"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 128 + signal.SIGTERM


def test_a_script_that_may_not_be_executed_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("echo\n")
    assert main(["exec", "--", "./run.sh"]) == 2
    assert "rlprobe exec -- bash ./run.sh" in capsys.readouterr().err
    assert main(["exec", "--collector", "absent.yaml", "--", "true"]) == 2
    assert "--collector names absent.yaml" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["exec", "--", "no-such-program"]) == 2
    assert "no-such-program" in capsys.readouterr().err
    assert not (tmp_path / "rlprobe_dump").exists()


def test_the_switch_knows_a_plain_recording(tmp_path: Path) -> None:
    found = switch.read(plain.write(tmp_path / "dump"))
    assert (found.kind, found.frameworks) == ("plain", ("verl", "slime"))
    assert found.directory == str(tmp_path / "dump")


@pytest.mark.parametrize("text", ['{"records_to": "relative"}', '{"records_to": 3}',
                                  '{"records_to": "/a", "more": 1}'])  # fmt: skip
def test_what_only_looks_like_one_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="neither"):
        switch.read(path)


def test_every_training_stage_of_the_first_step_is_asked_for(tmp_path: Path) -> None:
    ran = (stages.GENERATE, stages.LOG_PROB, stages.ACTOR_UPDATE)
    made = plain.session(str(tmp_path), "verl", ran, expected=ran)
    assert made.capture.stages == made.expected_stages == (stages.LOG_PROB, stages.ACTOR_UPDATE)
    assert (made.capture.step_start, made.capture.step_end) == (0, 0)
    assert made.capture.engine == "light"
    assert not made.deterministic, "what is watched is not changed"


def test_a_job_elsewhere_is_given_the_hooks_and_what_the_run_was_given() -> None:
    environ = {
        "RLPROBE_CONFIG": "/x.json",
        "RLPROBE_STAGES": "actor_train",
        "VERL_USE_EXTERNAL_MODULES": "a,b",
        forward.NAMES: "HCCL_DETERMINISTIC,MINE,RAY_ADDRESS,UNSET",
        "HCCL_DETERMINISTIC": "strict",
        "MINE": "1",
        "RAY_ADDRESS": "http://head:8265",
        "HOME": "/root",
    }
    found = forward.added_to({"env_vars": {"MINE": "the script's"}, "pip": ["x"]}, environ)
    assert found["pip"] == ["x"]
    assert found["env_vars"] == {
        "RLPROBE_CONFIG": "/x.json",
        "RLPROBE_STAGES": "actor_train",
        "VERL_USE_EXTERNAL_MODULES": "a,b",
        forward.NAMES: environ[forward.NAMES],
        "HCCL_DETERMINISTIC": "strict",
        "MINE": "the script's",
    }
    del environ["RLPROBE_CONFIG"]
    assert forward.added_to(None, environ) == {}


def test_rays_own_client_submits_them(tmp_path: Path) -> None:
    """The installed Ray, with the server left out: what would be posted to it."""
    pytest.importorskip("ray")
    path = plain.write(tmp_path / "dump")
    code = """
import rlprobe.autoload
from ray.job_submission import JobSubmissionClient as Client
import json
client = Client.__new__(Client)
client._default_metadata, client._cookies, client._headers = {}, None, None
client._upload_working_dir_if_needed = client._upload_py_modules_if_needed = lambda env: None
def post(method, endpoint, *, json_data=None, **_):
    print(json.dumps(json_data["runtime_env"]))
    raise SystemExit(0)
client._do_request = post
client.submit_job(entrypoint="true", runtime_env={"env_vars": {"A": "1"}})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RLPROBE_CONFIG": str(path), "RLPROBE_DRIVER_DIRECTORY": "/here"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout.splitlines()[-1])["env_vars"]
    assert sent["A"] == "1"
    assert sent["RLPROBE_CONFIG"] == str(path)
    assert sent["RLPROBE_DRIVER_DIRECTORY"] == "/here"
