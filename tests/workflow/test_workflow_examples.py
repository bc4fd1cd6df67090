"""Are the examples for real sites complete? Each is validated and planned as its site would."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from rlprobe import frameworks
from rlprobe.config import load
from rlprobe.runs.jobs import Jobs
from rlprobe.spec import RunSpec
from tests.sampled import every_second
from tests.workflow.project import Project

_ROOT = Path(__file__).resolve().parents[2]
#: Examples of sites with devices; the others run on any machine and are run by other tests.
EXAMPLES = [
    *sorted((_ROOT / "config/examples").glob("*_gpu_to_npu.yaml")),
    *sorted((_ROOT / "config/examples/two_sites").glob("*.yaml")),
    _ROOT / "config/examples/npu_box.yaml",
]
#: Where the sites of the examples keep models, data, images and stores.
_SITES = ("/shared", "/data", "/nfs")


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def example(request: pytest.FixtureRequest, project: Project) -> Path:
    """An example whose site's files exist, below the test's own directory."""
    source: Path = request.param
    text = source.read_text(encoding="utf-8")
    for site in _SITES:
        text = text.replace(f" {site}/", f" {project.directory}{site}/")
    path = project.directory / source.name
    path.write_text(text, encoding="utf-8")
    raw = yaml.safe_load(text)
    for model in raw["model"].values():
        make_model(Path(model))
    for file in [raw["data"]["train_files"], raw["data"].get("val_files")]:
        if file is not None:
            touch(Path(file))
    for section in (raw["benchmark"].get("container", {}), raw["target"].get("container", {})):
        if section.get("runtime") == "apptainer":
            touch(Path(section["image"]))
    for key in ("image", "torch_image"):
        if key in raw.get("analysis", {}):
            touch(Path(raw["analysis"][key]))
    imported = [raw["benchmark"].get("run"), raw.get("controls", {}).get("repeat")]
    for key in imported:
        if isinstance(key, str):
            touch(Path(raw["store"], "runs", key, "manifest.json"))
    return path


def make_model(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.mkdir(parents=True, exist_ok=True)
    body = len(header).to_bytes(8, "little") + header + bytes(4)
    (path / "model.safetensors").write_bytes(body)
    (path / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    (path / "tokenizer.json").write_text("{}", encoding="utf-8")


def touch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def test_it_is_valid_and_says_what_it_runs(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example.parent)
    jobs = Jobs.load(example)
    assert {"benchmark", "target"} <= set(jobs.runs)
    assert jobs.runs["benchmark"].device == "cuda"
    assert jobs.runs["target"].device == "npu"


@pytest.mark.parametrize("example", every_second(EXAMPLES), indirect=True, ids=lambda p: p.stem)
def test_it_is_planned_on_its_cluster(
    example: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Snakemake looks for it before it plans a job that has an image.
    stand_in = project.directory / "bin" / "apptainer"
    touch(stand_in)
    stand_in.write_text("#!/bin/sh\necho apptainer version 1.4.5\n", encoding="utf-8")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    profile = "npu_box" if example.stem == "npu_box" else "ascend_cluster"
    planned = project.planned(config=example.name, profile=f"profiles/{profile}")
    imported = load(example).benchmark.run is not None
    assert ("run_benchmark" in planned) is not imported
    assert planned["run_target"] == 1
    assert planned["verdict"] == 1


def commands(example: Path, scratch: Path) -> list[tuple[RunSpec, list[str]]]:
    """What each run that is made here starts; refuses options that a run sets itself."""
    places = frameworks.RunDirectories(scratch=scratch / "scratch", assets=scratch / "assets")
    made = [spec for spec in Jobs.load(example).runs.values() if spec.imported is None]
    return [(spec, frameworks.get(spec.framework).command(spec, places)) for spec in made]


def test_its_stages_are_what_the_framework_runs(
    example: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(example.parent)
    for spec, command in commands(example, tmp_path):
        assert command
        assert "actor_update" in frameworks.get(spec.framework).expected_stages(spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    every_second(p for p in EXAMPLES if "slime" not in p.name),
    indirect=True,
    ids=lambda p: p.stem,
)
def test_verl_knows_every_override(
    example: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """slime's own options can only be read where Megatron-LM and SGLang are installed."""
    monkeypatch.chdir(example.parent)
    hydra = pytest.importorskip("hydra")
    for spec, command in commands(example, tmp_path):
        overrides = [word for word in command[3:] if not word.startswith("hydra.")]
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", overrides)
        assert config.trainer.n_gpus_per_node * config.trainer.nnodes == spec.world_size


@pytest.mark.parametrize("pair", [("gpu_site", "npu_site"), ("slime_gpu_site", "slime_npu_site")])
def test_both_halves_of_two_sites_describe_one_alignment(pair: tuple[str, str]) -> None:
    """What is declared at both must be the same, or the second half replays another training."""
    halves = [
        yaml.safe_load((_ROOT / f"config/examples/two_sites/{name}.yaml").read_text())
        for name in pair
    ]
    places = {"store", "results", "benchmark", "target", "controls"}
    one, other = (
        {
            key: json.loads(re.sub('"/(data|nfs)/', '"/', json.dumps(value)))
            for key, value in half.items()
            if key not in places
        }
        for half in halves
    )
    assert one == other
    sides = ("device", "precision", "world_size")
    for role in ("benchmark", "target"):
        assert [halves[0][role][k] for k in sides] == [halves[1][role][k] for k in sides]
