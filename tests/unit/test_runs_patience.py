"""A busy machine: is Ray given another chance, and is nobody left in silence?"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rlprobe.runs import launch, patience
from rlprobe.runs.follow import Progress

LATE = (
    "Exception: The current node timed out during startup. This could happen because some of the "
    "raylet failed to startup or the GCS has become overloaded.\n"
)


@pytest.mark.parametrize(
    ("text", "late"),
    [
        (LATE, True),
        ("RuntimeError: Failed to connect to GCS.  Last 0 lines of error files:\n", True),
        ("TimeoutError: Timed out after 30 seconds while waiting for node to startup. Did\n", True),
        ("torch.OutOfMemoryError: CUDA out of memory\n", False),
        ("ConnectionError: ray:// refused\n", False),
        ("DistNetworkError: port: 41401, code: -98, name: EADDRINUSE, message: taken\n", True),
        ("OSError: [Errno 98] Address already in use\n", True),
        ("E0000 chttp2_server.cc: No address added out of total 1: address already in use\n", True),
        ("", False),
    ],
)
def test_what_a_start_that_failed_says_is_known(text: str, late: bool) -> None:
    assert (patience.reason(text, 0) is not None) is late


def test_a_lost_port_is_no_reason_for_a_long_wait() -> None:
    port, ray = (patience.reason(text, 1) for text in ("name: EADDRINUSE", LATE))
    assert port is not None and ray is not None
    assert port.wait < 5 < ray.wait == patience.WAITS[1]


class Attempts:
    """A start that fails in given ways, one after the other."""

    def __init__(self, directory: Path, *said: str, begins: int | None = None) -> None:
        self.directory = directory
        self.said = list(said)
        self.begins = begins
        self.environments: list[dict[str, str]] = []
        self.log = directory / "log"
        self.log.write_text("an older attempt's: " + LATE)
        progress = Progress("target", directory / "side", 1, self.log)
        spec: Any = type("Spec", (), {"role": "target"})()
        self.run = launch.Started(
            spec, directory, directory, self.log, {"MINE": "1"}, [["true"]], progress
        )

    def start(self, run: launch.Started) -> tuple[int, dict[str, str]]:
        number = len(self.environments)
        self.environments.append(dict(run.environment))
        if number == self.begins:
            (self.directory / "side").mkdir()
            event = {"stage": "actor_update", "step": 0, "trainer_step": 1, "seconds": None}
            (self.directory / "side/progress.jsonl").write_text(json.dumps(event) + "\n")
            run.progress()
        if number >= len(self.said):
            return 0, {}
        with self.log.open("a") as file:
            file.write(self.said[number])
        return 1, {}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr("rlprobe.runs.launch.time.sleep", slept.append)
    return slept


def test_a_late_ray_is_started_again_after_a_longer_wait(
    tmp_path: Path, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("rlprobe").propagate = True
    attempts = Attempts(tmp_path, LATE, LATE)
    with caplog.at_level(logging.WARNING, logger="rlprobe"):
        assert launch._patiently(attempts.run, attempts.start)[0] == 0
    assert waits == list(patience.WAITS)
    first, second, third = attempts.environments
    limit = "RAY_worker_register_timeout_seconds"
    assert limit not in first
    assert int(second[limit]) < int(third[limit])
    assert all(environment["MINE"] == "1" for environment in attempts.environments)
    assert "attempt 2 of 3" in caplog.text
    assert "timed out during startup" in caplog.text


def test_it_is_given_up_after_the_last_attempt(tmp_path: Path, waits: list[float]) -> None:
    attempts = Attempts(tmp_path, LATE, LATE, LATE, LATE)
    assert launch._patiently(attempts.run, attempts.start)[0] == 1
    assert len(attempts.environments) == 3


def test_another_failure_is_one_at_once(tmp_path: Path, waits: list[float]) -> None:
    """Also where the log of an earlier attempt, which is kept, tells of a late Ray."""
    attempts = Attempts(tmp_path, "CUDA out of memory\n")
    assert launch._patiently(attempts.run, attempts.start)[0] == 1
    assert (len(attempts.environments), waits) == (1, [])


def test_a_run_that_had_begun_is_not_begun_again(tmp_path: Path, waits: list[float]) -> None:
    attempts = Attempts(tmp_path, LATE, begins=0)
    assert launch._patiently(attempts.run, attempts.start)[0] == 1
    assert (len(attempts.environments), waits) == (1, [])


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("", "starting the framework"),
        ("ray init kwargs: {}\n", "starting Ray"),
        ("ray init kwargs\nStarted a local Ray instance.\n", "starting the workers"),
        ("(WorkerDict pid=7) Loading weights:  50%\n", "loading the model"),
        ("(W pid=7) Loading weights\n(W pid=7) torch.compile takes 41 s\n", "compiling kernels"),
    ],
)
def test_a_silent_minute_has_a_line(
    tmp_path: Path, text: str, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("rlprobe").propagate = True
    log = tmp_path / "log"
    log.write_text(text)
    follow = Progress("benchmark", tmp_path / "side", 2, log, silence_s=0.0)
    with caplog.at_level(logging.INFO, logger="rlprobe"):
        follow()
    assert f"benchmark: {phase}, for 0.0 s" in caplog.text


def test_a_silent_stage_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rlprobe").propagate = True
    (tmp_path / "side").mkdir()
    event = {"stage": "actor_update", "step": 0, "trainer_step": 1, "seconds": None}
    (tmp_path / "side/progress.jsonl").write_text(json.dumps(event) + "\n")
    follow = Progress("target", tmp_path / "side", 2, None, silence_s=0.0)
    with caplog.at_level(logging.INFO, logger="rlprobe"):
        follow()
        follow()
    assert "target: in step 1/2: actor_update, for 0.0 s; nothing new in its log" in caplog.text


def test_nothing_is_said_before_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("rlprobe").propagate = True
    with caplog.at_level(logging.INFO, logger="rlprobe"):
        Progress("target", tmp_path, 1, None)()
    assert caplog.text == ""
