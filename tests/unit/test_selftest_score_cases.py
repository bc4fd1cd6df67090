"""Which cases are run, in which alignments, and are they put back?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.errors import ConfigError, UsageError
from rlprobe.faults.patching import swapped
from rlprobe.selftest import alignments, catalogue
from rlprobe.stages import TRAINING_STAGES


def _file(directory: Path, name: str, body: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text("from rlprobe.selftest import benign, fault\n" + body)


def test_the_projects_own_faults_cover_every_stage_a_replay_runs() -> None:
    pytest.importorskip("torch")
    cases = catalogue.cases()
    faults = [case.declared for case in cases if not case.declared.is_benign]
    assert len(faults) >= 24
    assert sum(case.declared.is_benign for case in cases) >= 10
    covered = {declared.stage for declared in faults}
    assert covered >= set(TRAINING_STAGES) - {"teacher_compute_log_prob"}
    assert any(declared.needs.get("world_size") == 2 for declared in faults)
    assert any(declared.verdict == "not_comparable" for declared in faults)


def test_faults_come_before_benign_changes(tmp_path: Path) -> None:
    _file(tmp_path, "a.py", "@benign()\ndef calm(site):\n    yield\n")
    _file(
        tmp_path, "b.py", '@fault(stage="actor_update", cause="loss")\ndef wrong(site):\n    yield'
    )
    assert [case.name for case in catalogue.cases([tmp_path])] == ["wrong", "calm"]
    assert [case.name for case in catalogue.cases([tmp_path], ["calm"])] == ["calm"]
    assert catalogue.cases([tmp_path])[0].reference == f"{tmp_path / 'b.py'}:wrong"


def test_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    _file(tmp_path, "a.py", "@benign()\ndef calm(site):\n    yield\n")
    with pytest.raises(UsageError, match="'wild'; there are: calm"):
        catalogue.cases([tmp_path], ["wild"])


def test_the_same_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        _file(tmp_path, name, "@benign()\ndef calm(site):\n    yield\n")
    with pytest.raises(ConfigError, match=r"calm is declared in .*a\.py and in .*b\.py"):
        catalogue.cases([tmp_path])


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="declares a fault"):
        catalogue.cases([tmp_path])
    with pytest.raises(ConfigError, match="no directory"):
        catalogue.cases([tmp_path / "none"])


def test_the_quick_subset_shares_one_collected_run() -> None:
    pytest.importorskip("torch")
    chosen = catalogue.quick(catalogue.cases())
    assert len(chosen) == 4
    assert not any(case.declared.needs for case in chosen)
    assert [case.declared.is_benign for case in chosen] == [False, False, False, True]


def _alignment(needs: dict[str, Any], **further: Any) -> Any:
    return alignments.alignment(needs, store="s", results="r", name="n", **further)


def test_needs_become_an_alignment() -> None:
    found = _alignment(
        {"world_size": 2, "steps": 2, "algorithm": "grpo", "temperature": 0.7, "precision": "bf16"}
    )
    assert (found.benchmark.world_size, found.target.world_size) == (2, 2)
    assert (found.steps.total, found.steps.end) == (2, 1)
    assert (found.benchmark.precision, found.target.precision) == ("bf16", "bf16")
    assert "algorithm.adv_estimator=grpo" in found.overrides
    assert "actor_rollout_ref.rollout.temperature=0.7" in found.overrides


def test_models_follow_from_needs() -> None:
    assert _alignment({}).model.path == "builtin:tiny-qwen2"
    assert _alignment({"model": "moe"}).model.path == "builtin:tiny-qwen2-moe"
    assert _alignment({"response_lengths": "varied"}).model.path == "builtin:tiny-qwen2-brief"
    assert _alignment({"critic_head_bias": True}).model.critic_path.endswith("critic-bias")
    llama = _alignment({"model": "llama"}).model
    assert (llama.path, llama.critic_path) == ("builtin:tiny-llama", "builtin:tiny-llama-critic")


def test_only_the_target_has_other_kernels_and_the_declared_environment() -> None:
    found = _alignment({"environment": {"OMP_WAIT_POLICY": "passive"}})
    assert found.benchmark.environment == {}
    assert found.target.environment["ATEN_CPU_CAPABILITY"] == "default"
    assert found.target.environment["OMP_WAIT_POLICY"] == "passive"


def test_tensors_are_kept_by_msprobes_engine() -> None:
    assert _alignment({}).capture.engine == "light"
    found = _alignment({}, tensors=True).capture
    assert (found.engine, found.task) == ("msprobe", "tensor")


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        ({"colour": "red"}, "'colour' is unknown; accepted: world_size"),
        ({"world_size": 0}, "world_size: found 0"),
        ({"world_size": True}, "world_size: found True"),
        ({"algorithm": "dpo"}, "algorithm: found 'dpo'; accepted: ppo or grpo"),
        ({"temperature": 0}, "temperature: found 0"),
        ({"precision": "fp8"}, "precision: found 'fp8'"),
        ({"model": "moe", "response_lengths": "varied"}, "dense model only"),
        ({"model": "llama", "critic_head_bias": True}, "critics of Qwen2 only"),
    ],
)
def test_a_need_that_cannot_be_fulfilled_is_refused(needs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        _alignment(needs)


class _Base:
    def method(self) -> str:
        return "right"


def test_what_is_swapped_is_put_back_as_it_was() -> None:
    thing, table = _Base(), {"key": 1}
    with pytest.raises(ZeroDivisionError), swapped(thing, "method", lambda: "wrong"):
        assert thing.method() == "wrong"
        1 / 0  # noqa: B018
    assert thing.method() == "right"
    assert "method" not in vars(thing)
    with swapped(table, "key", 2):
        assert table == {"key": 2}
    assert table == {"key": 1}


def test_a_need_that_no_alignment_has_is_refused_before_anything_runs(tmp_path: Path) -> None:
    declared = "@benign(needs={'world': 2})\ndef change(site):\n    yield\n"
    (tmp_path / "one.py").write_text(f"from rlprobe.selftest import benign\n\n\n{declared}")
    with pytest.raises(ConfigError, match=r"one\.py: change: needs: 'world' is unknown"):
        catalogue.cases([tmp_path])
