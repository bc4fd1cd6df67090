"""workflow/bin: each machine finds the environment of its own architecture."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Path:
    made = tmp_path / "checkout"
    shutil.copytree(root / "workflow/bin", made / "workflow/bin", symlinks=True)
    for machine in ("x86_64", "aarch64"):
        place = made / f".venv-{machine}" / "bin"
        place.mkdir(parents=True)
        for program in ("python", "rlprobe"):
            (place / program).write_text(
                f'#!/bin/sh\necho {machine} {program} "$RLPROBE_PYTHON" "$@"\n'
            )
            (place / program).chmod(0o755)
    return made


def _on(checkout: Path, machine: str, program: str) -> subprocess.CompletedProcess[str]:
    fake = checkout / "fake"
    fake.mkdir(exist_ok=True)
    (fake / "uname").write_text(f'#!/bin/sh\n[ "$1" = -m ] && echo {machine} || echo node7\n')
    (fake / "uname").chmod(0o755)
    path = f"{fake}:{checkout}/workflow/bin:{os.environ['PATH']}"
    return subprocess.run(
        [program, "a b", "c"], env={"PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("program", ["python", "rlprobe"])
def test_a_machine_gets_its_own(checkout: Path, machine: str, program: str) -> None:
    said = _on(checkout, machine, program).stdout
    assert said == f"{machine} {program} {checkout}/workflow/bin/python a b c\n"


def test_a_machine_without_one_says_so(checkout: Path) -> None:
    done = _on(checkout, "riscv64", "rlprobe")
    assert done.returncode == 1
    assert "node7 is riscv64" in done.stderr
    assert ".venv-riscv64" in done.stderr


def test_the_clusters_profile_lets_each_node_look_for_its_python(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from snakemake.profiles import ProfileConfigFileParser

    file = root / "profiles/ascend_cluster/config.yaml"

    def read() -> dict[str, object]:
        with file.open() as stream:
            found: dict[str, object] = ProfileConfigFileParser().parse(stream)
        return found

    monkeypatch.delenv("RLPROBE_PYTHON", raising=False)
    assert "shared-fs-usage" not in read()
    monkeypatch.setenv("RLPROBE_PYTHON", "/x/workflow/bin/python")
    assert "software-deployment" not in str(read()["shared-fs-usage"])
