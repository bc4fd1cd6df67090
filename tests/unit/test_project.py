"""The project's own promises: what is pinned, and that the code is clean."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+")


def test_the_lock_names_versions_and_no_place(root: Path) -> None:
    lines = (root / "requirements/lock.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not _PIN.fullmatch(line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in pins]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize(
    "command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)], ids=" ".join
)
def test_the_code_is_clean(root: Path, command: tuple[str, ...]) -> None:
    """As ``make lint``; the workflow's own checks are in tests/workflow."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
