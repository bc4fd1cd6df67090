"""The project's own promises: what is pinned, and that the code is clean."""

from __future__ import annotations

import ast
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


#: Rooms of the package, from the ground up: a room may import from lower floors only.
_FLOORS = (
    {"errors"},
    {"stages", "sketch"},
    {"config", "rollouts", "store", "capture"},
    {"frameworks", "compare"},
    {"runs", "diagnose"},
    {"doctor", "refine", "report", "selftest"},
    {"cli"},
)
#: Doors besides: a declared fault is planted where a stage runs.
_DOORS = {("frameworks", "selftest")}


def _imports(file: Path) -> set[str]:
    """Rooms that a file imports from when it runs."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("rlprobe.")}
    return found


def test_dependencies_point_one_way(root: Path) -> None:
    floor = {room: number for number, rooms in enumerate(_FLOORS) for room in rooms}
    wrong = set()
    for file in sorted((root / "rlprobe").rglob("*.py")):
        room = file.relative_to(root / "rlprobe").parts[0].removesuffix(".py")
        if room not in floor:
            assert room in ("__init__", "__main__"), f"{file}: which floor is {room} on?"
            continue
        for other in _imports(file) & floor.keys() - {room}:
            if floor[other] >= floor[room] and (room, other) not in _DOORS:
                wrong.add((str(file.relative_to(root)), other))
    assert wrong == set()


def test_engines_know_no_framework(root: Path) -> None:
    """Both frameworks use the hooks of inference engines, which use neither."""
    found = set()
    for file in (root / "rlprobe/frameworks/engines").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= {name for name in ("verl", "slime") if f"rlprobe.frameworks.{name}" in text}
        found |= {name for name in ("verl", "slime") if f"import {name}" in text}
    assert found == set()
