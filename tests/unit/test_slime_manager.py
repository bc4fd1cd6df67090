"""Does a run record what slime generated, and a replay train on exactly that?"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions, ReplayOptions, Session
from rlprobe.errors import HookError, ReplayError
from rlprobe.frameworks.slime import control, debug_data, manager, manager_paths
from rlprobe.rollouts import hdf5

PROMPTS = ["1 plus 2 is", "3 plus 4 is"]


def sample(index: int, prompt: str = PROMPTS[0]) -> dict[str, Any]:
    return {
        "index": index,
        "prompt": prompt,
        "tokens": [11, 12, 20 + index],
        "response": "x",
        "response_length": 1,
        "reward": 0.5,
        "status": "completed",
        "teacher_log_probs": None,
    }


class Manager:
    """A rollout manager that saves and loads as slime's does, without an engine."""

    def __init__(self, prompts: list[str] | None = PROMPTS, **args: Any) -> None:
        defaults = {
            "save_debug_rollout_data": None,
            "load_debug_rollout_data": None,
            "load_debug_rollout_data_subsample": None,
            "rollout_temperature": 0.7,
        }
        self.args = types.SimpleNamespace(**(defaults | args))
        samples = None if prompts is None else [types.SimpleNamespace(prompt=p) for p in prompts]
        self.data_source = types.SimpleNamespace(dataset=types.SimpleNamespace(samples=samples))

    def generate(self, rollout_id: int) -> list[Any]:
        samples = self._get_rollout_data(rollout_id)
        if self.args.save_debug_rollout_data is not None:
            path = Path(self.args.save_debug_rollout_data.format(rollout_id=rollout_id))
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"rollout_id": rollout_id, "samples": [vars(s) for s in samples]}, path)
        return samples

    def _get_rollout_data(self, rollout_id: int) -> list[Any]:
        if self.args.load_debug_rollout_data is None:
            made = [sample(rollout_id * 2 + i, PROMPTS[i]) for i in range(2)]
        else:
            path = self.args.load_debug_rollout_data.format(rollout_id=rollout_id)
            made = torch.load(path, weights_only=False)["samples"]
        return manager.around_get_rollout_data(
            lambda self, rollout_id: [types.SimpleNamespace(**each) for each in made],
            self, (rollout_id,), {},
        )  # fmt: skip


def generate(made: Manager, rollout_id: int) -> list[Any]:
    return manager.around_generate(Manager.generate, made, (), {"rollout_id": rollout_id})


def session(root: Path, role: str = "benchmark", **more: Any) -> Session:
    stage = (stages.ACTOR_UPDATE,)
    made = Session(
        role=role,
        framework="slime",
        dump=str(root / "dump"),
        side=str(root / "side"),
        capture=CaptureOptions(stages=stage, step_end=1),
        expected_stages=stage,
        **more,
    )
    control.reset(made, resolved=True)
    return made


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manager, "_generated", 0)
    yield
    control.reset()


def collect(root: Path, first: int = 0) -> Path:
    """Two recorded rollouts; returns where they lie."""
    made = session(root / "collect")
    template = manager_paths.template(Path(made.side), manager_paths.RECORDED)
    here = Manager(save_debug_rollout_data=template)
    for rollout_id in (first, first + 1):
        generate(here, rollout_id)
    return Path(made.side) / "rollouts"


def replay(root: Path, rollouts: Path, **more: Any) -> Manager:
    options = ReplayOptions(path=str(rollouts), **more)
    made = session(root / "replay", "target", replay=options, collect_rollouts=False)
    template = manager_paths.template(Path(made.side), manager_paths.REPLAYED)
    return Manager(load_debug_rollout_data=template)


def test_each_rollout_becomes_a_step_counted_from_zero(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint begins at rollout 40: that is step 0."""
    directory = collect(tmp_path, first=40)
    assert list(hdf5.steps(directory)) == [0, 1]
    second = hdf5.read(directory / "step1.h5")
    assert second.trainer_step == 41
    assert second.sampling["temperature"] == 0.7
    assert second.samples[0].prompt_text == PROMPTS[0]
    first_step = json.loads((tmp_path / "collect/side/parts/first_step.json").read_text())
    assert first_step == {"first_step": 40}


def test_the_intermediate_file_does_not_stay(tmp_path: Path) -> None:
    collect(tmp_path)
    assert not list((tmp_path / "collect" / "side" / manager_paths.RECORDED).glob("*"))


def test_a_users_own_debug_files_stay(tmp_path: Path) -> None:
    session(tmp_path)
    here = Manager(save_debug_rollout_data=str(tmp_path / "mine" / "{rollout_id}.pt"))
    generate(here, 0)
    assert (tmp_path / "mine" / "0.pt").exists()


def test_a_replay_trains_on_the_recorded_samples(tmp_path: Path) -> None:
    rollouts = collect(tmp_path)
    here = replay(tmp_path, rollouts)
    for rollout_id in (5, 6):
        loaded = generate(here, rollout_id)
        assert [each.index for each in loaded] == [2 * (rollout_id - 5), 2 * (rollout_id - 5) + 1]
        assert "teacher_log_probs" not in vars(loaded[0])


def test_a_replay_order_is_followed(tmp_path: Path) -> None:
    rollouts = collect(tmp_path)
    here = replay(tmp_path, rollouts, seed=-1, step_start=1, step_end=1)
    assert [each.index for each in generate(here, 0)] == [2, 3]


def test_a_prompt_that_the_data_lacks_is_refused_with_its_rows(tmp_path: Path) -> None:
    rollouts = collect(tmp_path)
    here = replay(tmp_path, rollouts)
    here.data_source.dataset.samples.pop()
    with pytest.raises(ReplayError, match=r"1 of 2 samples .* \(rows 1\)"):
        generate(here, 0)


def test_a_data_source_without_a_list_of_prompts_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollouts = collect(tmp_path)
    here: Any = replay(tmp_path, rollouts)
    here.data_source = object()
    generate(here, 0)
    assert "not checked" in capsys.readouterr().err


def test_a_step_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    rollouts = collect(tmp_path)
    here = replay(tmp_path, rollouts)
    for rollout_id in (0, 1):
        generate(here, rollout_id)
    with pytest.raises(ReplayError, match="step 2 was not recorded"):
        generate(here, 2)


def test_a_path_without_the_rollouts_number_is_refused(tmp_path: Path) -> None:
    """slime would load one file at every step, silently."""
    rollouts = collect(tmp_path)
    here = replay(tmp_path, rollouts)
    here.args.load_debug_rollout_data = str(tmp_path / "always.pt")
    with pytest.raises(ReplayError, match="repeat one file"):
        generate(here, 0)


def test_a_subsample_is_refused(tmp_path: Path) -> None:
    here = replay(tmp_path, collect(tmp_path))
    here.args.load_debug_rollout_data_subsample = 0.5
    with pytest.raises(ReplayError, match="subsample"):
        generate(here, 0)


def test_other_tokens_than_recorded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replay(tmp_path, collect(tmp_path))
    original = debug_data.from_rollouts

    def changed(recorded: Any) -> list[dict[str, Any]]:
        samples = original(recorded)
        samples[1]["tokens"][-1] += 1
        return samples

    monkeypatch.setattr(debug_data, "from_rollouts", changed)
    with pytest.raises(ReplayError, match=r"1 have other tokens .* row 1"):
        generate(here, 0)


def test_a_run_that_trained_nothing_fails_and_says_why(tmp_path: Path) -> None:
    """A checkpoint of iteration 0 makes slime begin at 1: with one rollout, nothing is left."""
    session(tmp_path)
    here = Manager(start_rollout_id=1, num_rollout=1)
    with pytest.raises(HookError, match=r"single rollout.*starts at rollout 1.*--num-rollout is 1"):
        manager.around_dispose(lambda self: None, here, (), {})


def test_a_stage_that_left_nothing_fails_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = session(tmp_path)
    control.reset(Session(**{**vars(made), "expected_stages": (stages.LOG_PROB,)}), resolved=True)
    monkeypatch.setattr(manager, "_generated", 1)
    with pytest.raises(HookError, match=r"actor_compute_log_prob.*--keep-old-actor"):
        manager.around_dispose(lambda self: None, Manager(), (), {})


def test_without_a_session_nothing_is_done(tmp_path: Path) -> None:
    control.reset(None, resolved=True)
    here = Manager(save_debug_rollout_data=str(tmp_path / "{rollout_id}.pt"))
    assert len(generate(here, 0)) == 2
    assert manager.around_dispose(lambda self: "done", here, (), {}) == "done"
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]
