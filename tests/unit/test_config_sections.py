"""I wrote an alignment file: is it understood, and if not, am I told what to change?"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlprobe.config import Alignment, parse
from rlprobe.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "name": "a",
    "framework": "verl",
    "framework_version": "0.9.1",
    "model": {"path": "builtin:tiny-qwen2"},
    "data": {"train_files": "builtin:arithmetic"},
}


def alignment(**changes: Any) -> Alignment:
    return parse({**copy.deepcopy(SMALLEST), **changes}, "a.yaml")


def message(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        alignment(**changes)
    return str(caught.value)


def test_the_smallest_file_aligns_the_cpu_with_itself() -> None:
    found = alignment()
    assert (found.benchmark.device, found.target.device) == ("cpu", "cpu")
    assert found.controls.repeat
    assert found.capture.engine == "light"
    assert found.data.train_files == ("builtin:arithmetic",)


def test_every_problem_is_listed_at_once_with_its_key_path() -> None:
    text = message(seed="one", benchmark={"device": "gpu"}, model={})
    assert text.startswith("a.yaml: 3 problems\n")
    assert "  seed: found 'one' (text); accepted: a whole number" in text
    assert "  benchmark.device: found 'gpu' (text); accepted: cpu, cuda or npu" in text
    assert "  model.path: nothing found; this key must be given" in text


def test_a_misspelt_key_is_refused_and_the_right_one_suggested() -> None:
    assert "target.enviroment: no such key" in message(target={"enviroment": {}})
    assert "did you mean environment?" in message(target={"enviroment": {}})


def test_a_misspelt_value_is_refused_and_the_right_one_suggested() -> None:
    assert "found 'verll' (text); accepted: verl or slime; did you mean verl?" in message(
        framework="verll"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"framework_version": 0.9}, "framework_version: found 0.9 (a number); accepted: text"),
        ({"deterministic": "yes"}, "deterministic: found 'yes' (text); accepted: true or false"),
        ({"coverage": 1.5}, "coverage: found 1.5 (a number); accepted: less than or equal to 1"),
        ({"overrides": "a=b"}, "overrides: found 'a=b' (text); accepted: a list"),
        ({"steps": {"total": 2, "end": 2}}, "steps.end: 2 lies outside the 2 steps"),
        ({"steps": {"total": 3, "start": 2, "end": 1}}, "steps.start: 2 lies after end: 1"),
        ({"capture": {"task": "tensor"}}, "capture.task: tensor needs engine: msprobe"),
        ({"capture": {"sketch": False, "token_sketch": True}}, "needs sketch: true"),
        ({"capture": {"ranks": [1]}}, "capture.ranks: found 1, but no side has more than 1"),
        ({"capture": {"stages": []}}, "capture.stages: an empty list records nothing"),
        ({"capture": {"token_range": [2, 1]}}, "capture.token_range: found [2, 1]"),
        ({"benchmark": {"run": "abc"}}, "benchmark.run: found 'abc' (text); accepted: text match"),
        ({"benchmark": {"container": {"runtime": "docker"}}}, "container.image: nothing found"),
        ({"benchmark": {"container": {"image": "a.sif"}}}, "image is given but runtime is none"),
        ({"target": {"environment": {"A": True}}}, "environment.A: found True (a truth value)"),
        ({"target": {"fault": "faults.py"}}, "target.fault: found 'faults.py' (text)"),
        ({"target": {"resources": {"gres": "npu-8"}}}, "resources.gres: found 'npu-8' (text)"),
        ({"target": {"resources": {"time": 90}}}, "resources.time: found 90; accepted: a number"),
        ({"target": {"resources": {"extra": "--qos=high"}}}, "resources.extra: found --qos"),
        ({"store": "my store"}, "store: found 'my store' (text)"),
        ({"name": "../up"}, "name: found '../up' (text)"),
        ({"data": {"train_files": []}}, "data.train_files: found [] (a list)"),
        ({"controls": {"repeat": "maybe"}}, "controls.repeat: found 'maybe' (text); accepted:"),
    ],
)
def test_a_wrong_value_is_refused_saying_what_was_found_and_what_is_accepted(
    changes: dict[str, Any], expected: str
) -> None:
    assert expected in message(**changes)


def test_curves_and_rejoining_contradict_each_other() -> None:
    said = message(controls={"rejoin": True, "perturbed": 2})
    assert "has no curves for perturbed controls to judge; accepted: one of the two" in said
    assert alignment(controls={"rejoin": True}).controls.rejoin
    assert not alignment().controls.rejoin


def test_a_wrong_stage_is_named_once_with_the_stages_there_are() -> None:
    text = message(capture={"stages": ["actor_updte"]})
    assert text.startswith("a.yaml: 1 problem\n")
    assert "capture.stages[0]: stage 'actor_updte' is unknown" in text
    assert "did you mean actor_update?" in text


def test_a_stage_may_be_given_by_the_frameworks_own_name() -> None:
    found = alignment(capture={"stages": ["old_log_prob", "compute_values"]})
    assert found.capture.stages == ("actor_compute_log_prob", "critic_compute_values")


def test_chosen_stages_come_in_the_order_of_a_step() -> None:
    found = alignment(capture={"stages": ["actor_update", "old_log_prob", "critic_update"]})
    available = ("reference_compute_log_prob", "actor_compute_log_prob", "actor_update")
    assert found.capture.chosen(available) == ("actor_compute_log_prob", "actor_update")


def test_whole_numbers_may_be_environment_values() -> None:
    assert alignment(target={"environment": {"OMP_NUM_THREADS": 1}}).target.environment == {
        "OMP_NUM_THREADS": "1"
    }


def test_a_site_without_an_npu_resource_asks_for_whole_nodes() -> None:
    found = alignment(target={"resources": {"gres": None, "exclusive": True, "memory": "512G"}})
    assert found.target.resources.memory_mib == 512 * 1024


@pytest.mark.parametrize(("written", "minutes"), [("90m", 90), ("4h", 240), ("2d", 2880)])
def test_a_time_limit_says_its_unit(written: str, minutes: int) -> None:
    assert alignment(target={"resources": {"time": written}}).target.resources.minutes == minutes


@pytest.mark.parametrize(("level", "instead"), [("L2", "refine"), ("debug", "key_data")])
def test_levels_that_no_stage_has_say_what_to_use(level: str, instead: str) -> None:
    said = message(capture={"engine": "msprobe", "level": level})
    assert f"found '{level}'" in said
    assert instead in said
    assert "accepted: L0, L1 or mix" in said
