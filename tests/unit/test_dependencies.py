"""Is what the package asks for what it uses, on every Python it says it runs on?"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib

#: Import name where it is not the distribution's.
_IMPORTED_AS = {"PyYAML": "yaml", "mindstudio-probe": "msprobe"}
#: Asked for without being imported: a command, and what VeRL imports without asking for it.
_FOR_OTHERS = {"snakemake", "snakemake-executor-plugin-slurm", "cachetools", "fastapi", "uvicorn"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def normalised(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    found: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def asked(project: dict[str, Any], extras: Iterable[str]) -> list[str]:
    """Requirements of the package with some extras, and of those that they name."""
    found = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            if requirement.startswith("rlprobe["):
                found += asked(project, requirement[len("rlprobe[") : -1].split(","))
            else:
                found.append(requirement)
    return found


def test_nothing_is_shipped_that_is_never_imported(root: Path, project: dict[str, Any]) -> None:
    imported = set()
    for file in (root / "rlprobe").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.partition(".")[0])
    names = {
        match.group() for r in asked(project, ["workflow", "verl"]) if (match := _NAME.match(r))
    }
    assert {"numpy", "polars", "ray"} <= names
    idle = {name for name in names - _FOR_OTHERS if _IMPORTED_AS.get(name, name) not in imported}
    assert idle == set()


def needed(names: Iterable[str]) -> set[str]:
    """Distributions with all that they need themselves, as installed here."""
    found: set[str] = set()
    waiting = [normalised(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            requirements = importlib.metadata.requires(name) or []
            # markers of an extra, another system or another Python
            waiting += [normalised(r) for r in requirements if ";" not in r]
    return found


def test_the_compare_image_holds_what_reporting_needs_and_no_more(
    root: Path, project: dict[str, Any]
) -> None:
    lines = (root / "containers/requirements/compare.txt").read_text(encoding="utf-8").splitlines()
    listed = {normalised(line) for line in lines if line and not line.startswith("#")}
    assert listed == needed(asked(project, ["report"]))


def test_the_oldest_python_is_one_that_static_checks_know(
    root: Path, project: dict[str, Any]
) -> None:
    """``make lint`` checks types against it, ruff its syntax; CI runs the tests on it."""
    oldest = project["requires-python"].removeprefix(">=")
    assert f"--python-version {oldest} " in (root / "Makefile").read_text(encoding="utf-8")
    ruff = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]
    assert ruff["target-version"] == "py" + oldest.replace(".", "")
    workflow = (root / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    assert f'"{oldest}"' in workflow


def test_the_lowest_versions_that_are_tried_are_those_that_are_accepted(
    root: Path, project: dict[str, Any]
) -> None:
    """``.github/workflows`` installs them beside the oldest Python."""
    lines = (root / "requirements/lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    lowest = {}
    for requirement in asked(project, ["report"]):
        name, _, bound = requirement.partition(">=")
        lowest[normalised(name)] = Version(bound)
    assert {normalised(name): Version(found) for name, found in pinned.items()} == lowest
    workflow = (root / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    assert "-c requirements/lowest.txt" in workflow
