"""slime's own launch against a real Ray job server: what reaches the job, and its workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlprobe.capture.session import ENV, Session
from rlprobe.frameworks import forward, plain
from tests.contract.conftest import RUN

pytestmark = [pytest.mark.slow, pytest.mark.contract]

#: A train.py that says what it and a worker of the cluster's find, and what is hooked in them.
_TRAIN = """
import json, os, sys
import ray

ray.init()

@ray.remote(num_cpus=0.1)
def seen():
    import sys
    return dict(os.environ), "rlprobe.autoload" in sys.modules

worker, hooked = ray.get(seen.remote())
own = "rlprobe.autoload" in sys.modules
with open(sys.argv[sys.argv.index("--hf-checkpoint") + 1], "w") as file:
    json.dump({"own": dict(os.environ), "worker": worker, "hooked": [own, hooked]}, file)
"""


def _free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head with its dashboard, started beforehand and knowing nothing of rlprobe's."""
    ports = {name: _free() for name in ("port", "dashboard-port", "ray-client-server-port",
                                        "dashboard-agent-listen-port")}  # fmt: skip
    place = Path("/tmp") / f"rj{os.getpid()}"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RLPROBE_", "RAY_"))},
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
         "--node-ip-address=127.0.0.1", "--num-cpus=4", "--disable-usage-stats",
         "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--temp-dir={place}",
         *(f"--{name}={port}" for name, port in ports.items())],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    try:
        _await(address, head)
        yield address
    finally:
        head.terminate()
        head.wait(30)


def _await(address: str, head: subprocess.Popen[bytes]) -> None:
    import urllib.error
    import urllib.request

    deadline = time.monotonic() + 180
    while True:
        assert head.poll() is None, "ray start ended"
        try:
            urllib.request.urlopen(f"{address}/api/jobs/", timeout=2).read()
            return
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < deadline, "no job server"
            time.sleep(0.5)


def _environment(address: str, directory: Path, **more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled",
            "RLPROBE_CONFIG": str(plain.write(directory / "dump")), **more}  # fmt: skip


def _submitted(words: list[str], environment: dict[str, str], answer: Path) -> dict[str, Any]:
    done = subprocess.run(
        words, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


@pytest.mark.cell("slime", "ray job submit, by an alignment's start", RUN)
def test_an_alignments_run_gives_the_job_every_variable(server: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    answer = tmp_path / "answer.json"
    given = {
        "HCCL_DETERMINISTIC": "strict",
        "MINE_OF_ONE_SIDE": "7",
        "CUBLAS_WORKSPACE_CONFIG": "x",
    }
    # as an alignment has it: a session, whose version the start holds slime against
    session = tmp_path / "session.json"
    session.write_text(
        Session("benchmark", "slime", str(tmp_path / "dump"), str(tmp_path / "side")).to_json()
    )
    environment = _environment(
        server, tmp_path, RLPROBE_SLIME=str(tmp_path), **given, **{ENV: str(session)},
        **{forward.NAMES: ",".join([*given, "RAY_ADDRESS"])},
    )  # fmt: skip
    words = [sys.executable, "-m", "rlprobe.frameworks.slime.start"]
    found = _submitted([*words, "--hf-checkpoint", str(answer)], environment, answer)
    for process in ("own", "worker"):
        for name, value in {**given, "RLPROBE_CONFIG": environment["RLPROBE_CONFIG"]}.items():
            assert found[process].get(name) == value, (process, name)
        assert not found[process].get("RAY_ADDRESS", "").startswith("http")
    assert found["hooked"] == [True, True]


@pytest.mark.cell("slime", "ray job submit, by a user's own script under rlprobe exec", RUN)
def test_a_users_own_submission_gets_the_hooks(server: str, tmp_path: Path) -> None:
    """``ray job submit --runtime-env-json`` of the user's: theirs stays, ours is added."""
    (tmp_path / "train.py").write_text(_TRAIN)
    answer = tmp_path / "answer.json"
    sent = json.dumps({"env_vars": {"THEIRS": "1"}})
    found = _submitted(
        ["ray", "job", "submit", "--address", server, "--runtime-env-json", sent, "--",
         sys.executable, str(tmp_path / "train.py"), "--hf-checkpoint", str(answer)],
        _environment(server, tmp_path), answer,
    )  # fmt: skip
    assert found["worker"]["THEIRS"] == "1"
    assert found["hooked"] == [True, True]
