"""Does msprobe's own config.json with DUMP_ON=1 do what slime's users expect of it?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlprobe import stages
from rlprobe.errors import ConfigError
from rlprobe.frameworks.slime import control, user_config

#: The example of the vendor's guide, with a path of the test's.
GUIDE: dict[str, Any] = {
    "task": "statistics",
    "rank": [],
    "step": [0],
    "level": "mix",
    "async_dump": False,
    "extra_info": True,
    "statistics": {
        "scope": [],
        "list": [],
        "tensor_list": [],
        "data_mode": ["all"],
        "summary_mode": "statistics",
    },
}


def write(tmp_path: Path, **more: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GUIDE, "dump_path": str(tmp_path / "dump"), **more}))
    return path


def test_the_guides_example(tmp_path: Path) -> None:
    made = user_config.session(write(tmp_path), {})
    assert made.dump == str(tmp_path / "dump")
    capture = made.capture
    assert (capture.engine, capture.level, capture.task) == ("msprobe", "mix", "statistics")
    assert (capture.step_start, capture.step_end) == (0, 0)
    assert capture.stages == stages.TRAINING_STAGES
    assert made.settings["msprobe"]["statistics"] == GUIDE["statistics"]


def test_every_step_where_none_is_named(tmp_path: Path) -> None:
    capture = user_config.session(write(tmp_path, step=[]), {}).capture
    assert capture.wants_step(0)
    assert capture.wants_step(10**6)


def test_steps_and_ranks_may_be_ranges(tmp_path: Path) -> None:
    made = user_config.session(write(tmp_path, step=[1, "4-6"], rank=["0-1", 7]), {})
    assert made.settings["steps"] == [1, 4, 5, 6]
    assert made.capture.ranks == (0, 1, 7)


def test_stages_alone_or_together_by_their_names_in_slime(tmp_path: Path) -> None:
    path = write(tmp_path)
    one = user_config.session(path, {user_config.STAGES: "ref_compute_log_prob"})
    assert one.capture.stages == (stages.REFERENCE,)
    two = user_config.session(path, {user_config.STAGES: "actor_train, old_log_prob"})
    assert two.capture.stages == (stages.LOG_PROB, stages.ACTOR_UPDATE)


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("dump_path", "/data/a b", "letters, digits"),
        ("dump_path", None, "letters, digits"),
        ("step", ["all"], 'ranges such as "0-3"'),
        ("rank", [-1], "numbers from 0"),
        ("level", "L3", "L0, L1, mix"),
        ("task", "overflow", "statistics, tensor"),
        ("statistics", {"summary_mode": "sha"}, "statistics, md5, xor"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(
    tmp_path: Path, key: str, value: Any, accepted: str
) -> None:
    with pytest.raises(ConfigError, match=accepted):
        user_config.session(write(tmp_path, **{key: value}), {})


@pytest.mark.parametrize(
    ("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("2", True)]
)
def test_dump_on_switches(tmp_path: Path, value: str | None, on: bool) -> None:
    environ = {"RLPROBE_CONFIG": str(write(tmp_path))}
    if value is not None:
        environ[user_config.DUMP_ON] = value
    assert control.switched_on(environ) is on


def test_dump_on_must_be_a_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DUMP_ON: found 'yes'"):
        control.switched_on({"RLPROBE_CONFIG": str(write(tmp_path)), "DUMP_ON": "yes"})


@pytest.mark.parametrize(("on", "finders"), [("0", False), ("1", True)])
def test_a_process_is_hooked_only_when_the_dump_is_on(
    tmp_path: Path, on: str, finders: bool
) -> None:
    """At interpreter start, as Ray's workers begin: nothing of torch or slime is imported."""
    code = (
        "import sys, rlprobe.autoload;"
        "hooked = any(type(f).__name__ == '_PostImportFinder' or "
        "getattr(f, '__name__', '') == '_PostImportFinder' for f in sys.meta_path);"
        "print(hooked, 'torch' in sys.modules)"
    )
    environ = {**os.environ, "RLPROBE_CONFIG": str(write(tmp_path)), "DUMP_ON": on}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(finders), "False"]


@pytest.mark.parametrize(("level", "instead"), [("L2", "refine"), ("debug", "key data")])
def test_levels_that_no_stage_has_say_what_to_use(tmp_path: Path, level: str, instead: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(f'{{"dump_path": "/d", "task": "statistics", "level": "{level}"}}')
    with pytest.raises(ConfigError, match=instead):
        user_config.session(file, {})
