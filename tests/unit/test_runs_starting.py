"""How long a run will take to start is what the last one of its kind took."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from rlprobe.config import Alignment
from rlprobe.frameworks.progress import FILE
from rlprobe.runs import starting
from rlprobe.runs.follow import Progress
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec


@pytest.fixture
def spec() -> RunSpec:
    raw = {
        "name": "t",
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"},
        "data": {"train_files": "builtin:arithmetic"},
    }
    return plan(Alignment.model_validate_json(json.dumps(raw)), {})["benchmark"]


def test_what_the_last_one_took_is_expected_of_its_kind_alone(
    spec: RunSpec, tmp_path: Path
) -> None:
    assert starting.expected(tmp_path, spec) is None
    starting.remember(tmp_path, spec, 31.26)
    starting.remember(tmp_path, dataclasses.replace(spec, ray=not spec.ray), 90.0)
    assert starting.expected(tmp_path, dataclasses.replace(spec, seed=spec.seed + 1)) == 31.3
    assert starting.expected(tmp_path, dataclasses.replace(spec, ray=not spec.ray)) == 90.0
    for other in ({"device": "npu"}, {"framework": "slime"}):
        assert starting.expected(tmp_path, dataclasses.replace(spec, **other)) is None  # type: ignore[arg-type]
    starting.remember(tmp_path, spec, 2.0)
    assert starting.expected(tmp_path, spec) is None, "nobody waits for that"


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"verl cpu none ray": "soon"}', "\x00"])
def test_what_cannot_be_read_is_no_estimate(spec: RunSpec, tmp_path: Path, damage: str) -> None:
    starting.remember(tmp_path, spec, 31.0)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(damage)
    assert starting.expected(tmp_path, spec) is None
    starting.remember(tmp_path, spec, 12.0)
    assert starting.expected(tmp_path, spec) == 12.0


def test_a_run_has_started_with_its_first_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlprobe")
    idle = Progress("target", tmp_path, 1)
    idle()
    assert idle.started_after is None
    progress = Progress("target", tmp_path, 1)
    event = {"step": 0, "stage": "actor_update", "seconds": None}
    (tmp_path / FILE).write_text(json.dumps(event) + "\n")
    progress()
    assert progress.started_after is not None and progress.started_after >= 0
    assert "target: started after" in caplog.text
