"""Analysis jobs inside an image, where Snakemake's Apptainer is not what a site has."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.cli import main
from rlprobe.runs.jobs import Jobs


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A docker that says what it was called with and runs what follows the image."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(
        '#!/bin/sh\n[ "$1" = run ] || exit 0\nprintf "%s\\n" "$@" > "$0.args"\nexit 5\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    # a short path, as a node's own disk has one: pytest's leave no room for Ray's sockets
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as node:
        monkeypatch.setenv("RLPROBE_NODE_TMP", node)
        yield tmp_path


def _config(site: Path, **analysis: Any) -> Path:
    path = site / "a.yaml"
    raw = {
        "name": "n", "framework": "verl", "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"}, "data": {"train_files": "builtin:arithmetic"},
        "analysis": analysis,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(raw))
    return path


def test_a_command_runs_in_the_analysis_image_with_store_and_results(site: Path) -> None:
    config = _config(site, runtime="docker", image="r/compare:1", torch_image="r/torch:1")
    words = ["enter", "--config", str(config), "--", "rlprobe", "compare", "A", "B", "-o", "C"]
    assert main(words) == 5, "the status of the command inside"
    called = (site / "bin/docker.args").read_text().splitlines()
    assert "r/compare:1" in called
    assert f"{site}:{site}" in called, "the working directory, which holds store and results"
    assert any("-m rlprobe compare A B -o C" in " ".join(called[i:]) for i in range(len(called)))
    node = Path(os.environ["RLPROBE_NODE_TMP"])
    assert not any(node.iterdir()), "the job's directories are gone"
    words.insert(3, "--torch")
    assert main(words) == 5
    assert "r/torch:1" in (site / "bin/docker.args").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--"], "no command"), (["--torch", "--", "compare"], "analysis.torch_image")],
)
def test_what_cannot_be_entered_is_said(
    site: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(site, runtime="docker", image="r/compare:1")
    assert main(["enter", "--config", str(config), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("analysis", "snakemakes", "begins"),
    [
        ({}, None, "rlprobe"),
        ({"image": "i.sif"}, "i.sif", "rlprobe"),
        ({"image": "r:1", "runtime": "docker"}, None, "rlprobe enter --config a.yaml --"),
        ({"image": "r:1", "runtime": "pyxis"}, None, "rlprobe enter --config a.yaml --"),
    ],
)
def test_one_of_the_two_enters_an_image(
    site: Path, analysis: dict[str, str], snakemakes: str | None, begins: str
) -> None:
    jobs = Jobs.load(_config(site, **analysis))
    assert jobs.image() == snakemakes
    assert jobs.entered("a.yaml") == begins
    assert jobs.image(torch=True) is None
    assert jobs.entered("a.yaml", torch=True) == "rlprobe"


def test_a_comparison_is_named_after_its_runs_alone(site: Path, capsys: Any) -> None:
    mark = site / "r/compare/target/.of-0123456789abcdef"
    older = mark.with_name(".of-fedcba9876543210")
    older.parent.mkdir(parents=True)
    older.touch()
    (mark.parent / "actor_update").mkdir()
    assert main(["config", "sides", str(mark)]) == 0
    assert mark.is_file()
    assert not older.exists()
    assert (mark.parent / "actor_update").is_dir()
    assert main(["config", "sides", str(mark.parent / "anything")]) == 2
    assert "names no two runs" in capsys.readouterr().err


def test_snakemakes_apptainer_is_opened_to_a_store_that_lies_elsewhere(
    site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path_factory.mktemp("shared")
    places = {"store": str(shared / "store"), "results": str(shared / "results")}

    def opened(given: str, make: bool, elsewhere: bool, **analysis: str) -> str:
        config = _config(site, **analysis)
        raw = yaml.safe_load(config.read_text())
        config.write_text(yaml.safe_dump({**raw, **(places if elsewhere else {})}))
        monkeypatch.setenv("APPTAINER_BIND", given)
        Jobs.load(config).open_images(make=make)
        return os.environ["APPTAINER_BIND"]

    assert opened("", False, True, image="i.sif") == "", "what is not there cannot be bound"
    bound = f"/site/scratch,{shared}/store,{shared}/results/n"
    assert opened("/site/scratch", True, True, image="i.sif") == bound
    # as the jobs find it, which read the file again
    assert opened(bound, False, True, image="i.sif") == bound
    assert opened("", False, True, torch_image="t.sif") == bound.removeprefix("/site/scratch,")
    # below the working directory, which Snakemake binds, and where rlprobe enters itself
    assert opened("", True, False, image="i.sif") == ""
    assert opened("/site", True, True, image="r:1", runtime="docker") == "/site"
