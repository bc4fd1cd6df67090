"""Is a self-test's screen a line per case, and is the rest in each trial's log?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.errors import RunError
from rlprobe.selftest import pipeline
from rlprobe.selftest.pipeline import Pipeline

FAULTS = """
from rlprobe.selftest import benign


@benign()
def calm(site):
    yield


@benign()
def quiet(site):
    yield


@benign(needs={"world_size": 2})
def broken(site):
    yield
"""
PROGRESS = "target: step 1/1: actor_update, 0.5 s"


@pytest.fixture(autouse=True)
def logger() -> Iterator[None]:
    """The package's logger as it was before a command set it up."""
    found = logging.getLogger("rlprobe")
    before, level, propagate = found.handlers[:], found.level, found.propagate
    yield
    found.handlers[:], found.propagate = before, propagate
    found.setLevel(level)


@pytest.fixture
def selftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, on a pipeline that trains and compares nothing, but says as much."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "some.py").write_text(FAULTS)
    speaks = logging.getLogger("rlprobe")

    def launch(spec: Any, store: Path, **_: Any) -> Path:
        manifest = store / "runs" / spec.key / "manifest.json"
        if spec.role == "target":
            speaks.info(PROGRESS)
            if "broken" in spec.fault:
                raise RunError("target: verl ended with exit status 1")
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.touch()
        return manifest

    def compare(self: Pipeline, jobs: Any, pair: str, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)

    def diagnosed(self: Pipeline, jobs: Any, repeat: Path, directory: Path) -> Diagnosis:
        directory.mkdir(parents=True, exist_ok=True)
        return Diagnosis("aligned", "…", [], None, None, {}, {}, [])

    monkeypatch.setattr(pipeline, "launch", launch)
    monkeypatch.setattr(Pipeline, "_compare", compare)
    monkeypatch.setattr(Pipeline, "_diagnosed", diagnosed)

    def run(*words: str) -> Path:
        where = tmp_path / "work"
        faults = str(tmp_path / "faults")
        main(["selftest", "--faults", faults, "--directory", str(where), "--no-passes", *words])
        return where / "logs"

    return run


def test_the_screen_has_a_line_per_case_and_what_matters(
    selftest: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    selftest()
    assert capsys.readouterr().err.splitlines() == [
        "rlprobe: broken: collecting a new alignment (world_size 2, seed 1)",
        "rlprobe: broken: target: verl ended with exit status 1",
        "rlprobe: 1 of 3: broken: 0 of 1 alarm, 1 failed",
        "rlprobe: calm: collecting a new alignment (seed 1)",
        "rlprobe: 2 of 3: calm: 0 of 1 alarm",
        "rlprobe: 3 of 3: quiet: 0 of 1 alarm",
        "rlprobe: falls short: 1 benign runs failed and were not judged",
    ]


@pytest.mark.parametrize("words", [(), ("-v",), ("-q",), ("--jobs", "2")])
def test_each_trials_log_has_all_of_its_own(selftest: Any, words: tuple[str, ...]) -> None:
    logs = selftest(*words)
    for name in ("calm", "quiet", "broken"):
        text = (logs / f"{name}.log").read_text()
        assert text.count(PROGRESS) == 1
        assert [other for other in ("calm", "quiet", "broken") if f"{other}: " in text] in (
            [],
            [name],
        )
    assert "verl ended with exit status 1" in (logs / "broken.log").read_text()
    assert len(logging.getLogger("rlprobe").handlers) == 1, "logs of trials are closed"


def test_with_v_everything_is_told(selftest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    selftest("-v")
    assert capsys.readouterr().err.count(PROGRESS) == 3


def test_with_q_only_warnings_are(selftest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    selftest("-q")
    assert capsys.readouterr().err.splitlines() == [
        "rlprobe: broken: target: verl ended with exit status 1",
        "rlprobe: falls short: 1 benign runs failed and were not judged",
    ]


def test_a_later_self_test_adds_to_the_logs(selftest: Any) -> None:
    selftest()
    logs = selftest()
    assert (logs / "calm.log").read_text().count(PROGRESS) == 2
