"""verl's published versions: the hook points in each wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.config import load
from rlprobe.errors import ConfigError, HookError
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.verl import hooks, versions
from rlprobe.frameworks.verl.host.launch import FRAMEWORK
from rlprobe.runs.plan import plan
from tests.contract.conftest import CONTRACT
from tests.contract.runs import ROOT

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each version's package, unpacked from the wheel that its makers published."""
    place = tmp_path_factory.mktemp("wheels")
    found = {}
    for version in versions.KNOWN:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        done = subprocess.run(
            [*command, f"verl=={version}", "-d", str(place / version)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = (place / version).glob("verl-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place / version / "unpacked")
        found[version] = place / version / "unpacked"
    return found


@pytest.mark.cell("version", "hook points of 0.7.1, 0.8.0, 0.9.0, 0.9.1", CONTRACT)
@pytest.mark.parametrize("version", versions.KNOWN)
def test_every_hook_point_is_in_the_wheel(wheels: dict[str, Path], version: str) -> None:
    root = wheels[version] / "verl"
    assert versions.missing(root, version) == []
    versions.require(version, root)


@pytest.mark.cell("version", "no override of rlprobe's own that a version lacks", CONTRACT)
@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize("version", versions.KNOWN)
def test_every_override_of_ours_has_its_key(
    wheels: dict[str, Path], version: str, engine: str, tmp_path: Path
) -> None:
    """Hydra refuses a key that is not there, and one that is there with ``+``, in the job."""
    name = {"fsdp": "_generated_ppo_trainer", "megatron": "_generated_ppo_megatron_trainer"}
    place = wheels[version] / f"verl/trainer/config/{name[engine]}.yaml"
    known = set(keys_of(yaml.safe_load(place.read_text())))
    raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    raw |= {"framework_version": version, "ray": True, "capture": {"engine": "light"}}
    if engine == "megatron":
        raw["overrides"] = [*raw["overrides"], "model_engine=megatron"]
    # Megatron on a CPU is of the newest alone (docs/collector.md)
    cpu = engine == "fsdp" or version == versions.KNOWN[-1]
    for device in (*(["cpu"] if cpu else []), "cuda", "npu"):
        for side in ("benchmark", "target"):
            raw[side] = {"device": device, "precision": "bf16"}
        config = tmp_path / f"{device}.yaml"
        config.write_text(yaml.safe_dump(raw))
        for spec in plan(load(config), {}, located=False).values():
            command = FRAMEWORK.command(spec, RunDirectories(tmp_path, tmp_path))
            ours = [w for w in command if "=" in w and w not in raw["overrides"]]
            assert len(ours) > 20
            for word in ours:
                key = word.partition("=")[0]
                if key.startswith(("hydra.", "++", "model_engine")):
                    continue
                adds, key = key.startswith("+"), key.lstrip("+")
                # Ray's options are a dictionary that takes any
                assert key.startswith("ray_kwargs.") or (key in known) != adds, word


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys of a configuration."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{prefix}{name}"
            yield from keys_of(inner, f"{prefix}{name}.")


def test_what_is_wrapped_is_what_is_checked() -> None:
    checked = {point.module for point in versions.HOOK_POINTS}
    instances = {"base", "transformer_impl"}  # wrapped on an engine's instance
    assert {m for m in checked if m.rpartition(".")[2] not in instances} | {
        "verl.workers.rollout.base"
    } == set(hooks._PATCHES)


@pytest.mark.cell("version", "a missing hook point fails before training, named", CONTRACT)
def test_a_missing_hook_point_is_named(wheels: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "verl"
    root.symlink_to(wheels["0.9.1"] / "verl")
    assert versions.missing(root, "0.9.1") == []
    changed = tmp_path / "changed/verl"
    for point in versions.HOOK_POINTS:
        inner = Path(*point.module.split(".")[1:]).with_suffix(".py")
        (changed / inner).parent.mkdir(parents=True, exist_ok=True)
        text = (root / inner).read_text().replace("def update_actor(", "def train_actor(")
        if inner.name != "skip_manager.py":
            (changed / inner).write_text(text)
    with pytest.raises(HookError) as raised:
        versions.require("0.9.1", changed)
    said = str(raised.value)
    assert "verl 0.9.1" in said
    assert "no verl.workers.engine_workers.ActorRolloutRefWorker.update_actor" in said
    assert "no verl.utils.skip.skip_manager.SkipManager.set_step" in said


@pytest.mark.cell("version", "an unknown version warns and is checked", CONTRACT)
def test_an_unknown_version_warns_and_is_checked(
    wheels: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    versions.require("0.10.0", wheels["0.9.1"] / "verl")
    assert "verl 0.10.0 is not among the versions" in capsys.readouterr().err
    with pytest.raises(HookError, match=r"verl 0\.10\.0"):
        versions.require("0.10.0", wheels["0.8.0"] / "verl")


@pytest.mark.cell("version", "0.7.1: the workers that cannot be captured are refused", CONTRACT)
def test_the_removed_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="use_legacy_worker_impl is 'auto'"):
        versions.require_engine_workers("0.7.1", {"trainer": {"use_legacy_worker_impl": "auto"}})
    versions.require_engine_workers("0.7.1", {"trainer": {"use_legacy_worker_impl": "disable"}})
    versions.require_engine_workers("0.9.1", {"trainer": {}})
