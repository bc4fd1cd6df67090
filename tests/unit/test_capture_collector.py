"""Does the vendor's precision_collector.yaml mean what its users know it to mean?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")

from rlprobe import stages
from rlprobe.capture import collector
from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError

PPO = tuple(s for s in stages.STAGES if s not in (stages.FORCED, stages.TEACHER))


def _load(tmp_path: Path, available: tuple[str, ...] = PPO, **options: Any) -> Session | None:
    path = tmp_path / "precision_collector.yaml"
    path.write_text(yaml.safe_dump({"precision_collector": options}))
    return collector.load(path, directory=tmp_path, framework="verl", available=available)


def _on(tmp_path: Path, available: tuple[str, ...] = PPO, **options: Any) -> Session:
    session = _load(tmp_path, available, msprobe=True, **options)
    assert session is not None
    return session


def test_the_documented_defaults_hold(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("precision_collector:\n")
    values = collector.read(tmp_path / "c.yaml")
    assert values == {
        "msprobe": False,
        "memory_dump": False,
        "dump_path": "./collector_save_path",
        "configurations_dump": False,
        "key_data_dump": False,
        "reference_dump": False,
        "actor_train_dump": False,
        "actor_infer_dump": False,
        "critic_train_dump": False,
        "step_start": 0,
        "step_end": 0,
        "token_range_start": 0,
        "token_range_end": 0,
        "level": "L0",
        "task": "statistics",
        "enable_mock_inference": False,
        "mock_random_seed": None,
        "mock_data_path": "./collector_saved_path",
        "mock_step_start": 0,
        "mock_step_end": 0,
    }


def test_the_master_switch_off_is_no_session_whatever_else_is_on(tmp_path: Path) -> None:
    assert _load(tmp_path, msprobe=False, key_data_dump=True, actor_train_dump=True) is None
    assert _load(tmp_path) is None


@pytest.mark.parametrize(
    ("switch", "expected"),
    [
        ("reference_dump", (stages.REFERENCE,)),
        ("actor_train_dump", (stages.LOG_PROB, stages.ACTOR_UPDATE)),
        ("actor_infer_dump", (stages.GENERATE,)),
        ("critic_train_dump", (stages.VALUES, stages.CRITIC_UPDATE)),
    ],
)
def test_each_switch_dumps_its_stages(
    tmp_path: Path, switch: str, expected: tuple[str, ...]
) -> None:
    options: dict[str, Any] = {switch: True}
    session = _on(tmp_path, **options)
    assert session.capture.stages == expected
    assert session.expected_stages == expected
    assert session.capture.engine == "msprobe"


def test_a_switch_for_a_stage_the_algorithm_lacks_asks_for_nothing(tmp_path: Path) -> None:
    grpo = (stages.GENERATE, stages.LOG_PROB, stages.ACTOR_UPDATE)
    session = _on(tmp_path, grpo, critic_train_dump=True, reference_dump=True)
    assert session.capture.stages == ()


def test_relative_paths_mean_the_drivers_directory(tmp_path: Path) -> None:
    assert _on(tmp_path, dump_path="./out").dump == str(tmp_path / "out")
    assert _on(tmp_path, dump_path="/abs/out").dump == "/abs/out"


def test_token_range_reaches_the_inference_stage_only_when_it_is_dumped(tmp_path: Path) -> None:
    ranged: dict[str, Any] = {"token_range_start": 1, "token_range_end": 3}
    assert _on(tmp_path, **ranged).capture.token_range is None
    assert _on(tmp_path, actor_infer_dump=True, **ranged).capture.token_range == (1, 3)


def test_a_collecting_run_writes_rollouts_and_a_replay_does_not(tmp_path: Path) -> None:
    assert _on(tmp_path).collect_rollouts
    (tmp_path / "saved").mkdir()
    session = _on(
        tmp_path,
        enable_mock_inference=True,
        mock_data_path="saved",
        mock_random_seed=-1,
        mock_step_start=2,
        mock_step_end=5,
    )
    assert not session.collect_rollouts
    assert session.replay is not None
    assert session.replay.path == str(tmp_path / "saved")
    assert (session.replay.seed, session.replay.step_start, session.replay.step_end) == (-1, 2, 5)


@pytest.mark.parametrize("none", [None, "None"])
def test_none_is_none_however_it_is_spelled(tmp_path: Path, none: Any) -> None:
    (tmp_path / "saved").mkdir()
    session = _on(
        tmp_path, enable_mock_inference=True, mock_data_path="saved", mock_random_seed=none
    )
    assert session.replay is not None
    assert session.replay.seed is None


def test_generation_is_not_expected_of_a_replay(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    session = _on(
        tmp_path, enable_mock_inference=True, mock_data_path="saved", actor_infer_dump=True
    )
    assert stages.GENERATE not in session.expected_stages


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"msprob": True}, "msprob: unknown"),
        ({"msprobe": "yes"}, "msprobe: found 'yes'; accepted: true or false"),
        ({"msprobe": 1}, "msprobe: found 1; accepted: true or false"),
        ({"step_start": -1}, "step_start: found -1"),
        ({"step_start": True}, "step_start: found True"),
        ({"step_end": 1.5}, "step_end: found 1.5"),
        ({"step_end": None}, "step_end: found None"),
        ({"step_start": 3, "step_end": 1}, "step_start <= step_end"),
        ({"token_range_start": 2}, "token_range_start <= token_range_end"),
        ({"mock_step_start": 4, "mock_step_end": 1}, "mock_step_start <= mock_step_end"),
        ({"level": "L9"}, "level: found 'L9'; accepted: L0, L1, mix"),
        ({"task": "everything"}, "task: found 'everything'"),
        ({"dump_path": ""}, "dump_path"),
        ({"dump_path": None}, "dump_path: found None"),
        ({"mock_random_seed": "x"}, "mock_random_seed: found 'x'"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_accepted(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match="accepted") as caught:
        _load(tmp_path, **{"msprobe": True, **options})
    assert said in str(caught.value)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, msprobe="on", level="L7", typo=1)
    assert all(word in str(caught.value) for word in ("msprobe", "level", "typo"))


def test_a_path_that_msprobe_would_refuse_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dump_path"):
        _on(tmp_path, dump_path="my dumps+1")


def test_rollouts_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="collector_saved_path is no directory"):
        _on(tmp_path, enable_mock_inference=True)


def test_memory_without_layers_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _on(tmp_path, memory_dump=True)
    assert "no memory snapshot" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "a: 1",
        "precision_collector: [1]",
        "precision_collector: {",
        "[]",
        "x: y\nprecision_collector: {}",
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="collector file"):
        collector.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        collector.read(tmp_path / "none.yaml")


def test_the_example_file_is_accepted() -> None:
    values = collector.read(Path(__file__).parents[2] / "config/precision_collector.yaml")
    assert values["msprobe"] is True


@pytest.mark.parametrize(
    ("level", "instead"), [("L2", "use mix, or refine"), ("debug", "key_data_dump")]
)
def test_levels_that_no_stage_has_are_refused_with_what_to_use(
    tmp_path: Path, level: str, instead: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"precision_collector: {{msprobe: true, level: {level}}}\n")
    with pytest.raises(ConfigError, match=instead):
        collector.read(path)
