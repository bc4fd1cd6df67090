"""``ray: false``: which runs do without Ray, and that their key does not know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.config import load
from rlprobe.errors import ConfigError
from rlprobe.frameworks import RunDirectories, get
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec


@pytest.fixture
def planned(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(root)

    def make(**changes: Any) -> dict[str, RunSpec]:
        raw = yaml.safe_load((root / "config/config.yaml").read_text()) | changes
        raw["overrides"] = [*raw["overrides"], *changes.pop("more", [])]
        raw.pop("more", None)
        file = tmp_path / "alignment.yaml"
        file.write_text(yaml.safe_dump(raw))
        return plan(load(file), {})

    return make


def _command(spec: RunSpec) -> list[str]:
    places = RunDirectories(scratch=Path("/s"), assets=Path("/a"))
    return get(spec.framework).command(spec, places)


def test_only_what_is_started_differs(planned: Any) -> None:
    with_ray, without = planned(ray=True), planned(ray=False)
    for role, spec in with_ray.items():
        assert spec.key == without[role].key
        ray, alone = _command(spec), _command(without[role])
        assert ray[:3] == ["python", "-m", "verl.trainer.main_ppo"]
        assert alone[:3] == ["python", "-m", "rlprobe.frameworks.verl.local.train"]
        assert ray[3:] == alone[3:]


_SIDE = {"device": "cpu", "precision": "fp32"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target": {"device": "npu", "precision": "bf16"}}, "target needs Ray for device npu"),
        ({"more": ["trainer.use_v1=true"]}, "trainer.use_v1"),
        ({"more": ["reward.reward_model.enable=true"]}, "reward.reward_model.enable"),
        ({"more": ["actor_rollout_ref.rollout.name=sglang"], "capture": {"token_range": None}},
         "rollout.name=sglang"),
        ({"framework_version": "0.7.1"}, r"verl 0.7.1 \(known: 0.8.0, 0.9.0, 0.9.1\)"),
        ({"entry_point": {"module": "recipe.dapo.main_dapo"}}, "an entry_point of one's own"),
        ({"target": {**_SIDE, "world_size": 2, "resources": {"nodes": 2}}}, "resources.nodes 2"),
    ],
)  # fmt: skip
def test_what_only_ray_gives_is_refused_before_anything_starts(
    planned: Any, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        planned(ray=False, **dict(changes))
    if "device" not in named:
        planned(ray=True, **dict(changes))


def test_slimes_processes_are_rays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    alignment = load("config/examples/slime_cpu.yaml")
    with pytest.raises(ConfigError, match="ray: slime's processes are Ray's"):
        plan(alignment.model_copy(update={"ray": False}), {}, located=False)
