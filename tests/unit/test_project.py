"""The project's own promises: what is pinned, and that the code is clean."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+")


def test_the_lock_names_versions_and_no_place(root: Path) -> None:
    lines = (root / "requirements/lock.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not _PIN.fullmatch(line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in pins]
    assert len(names) == len(set(names)) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("ruff", "check"), ("ruff", "format", "--check")], ids=" ".join
)
def test_the_code_is_clean(root: Path, command: tuple[str, ...]) -> None:
    """``make lint`` asks mypy as well; the workflow's own checks are in tests/workflow."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_path_is_taken_for_a_pattern(root: Path) -> None:
    """polars takes a path with ``*`` or ``[`` in it for a pattern, unless it is told not to."""
    readers = {"read_parquet", "scan_parquet"}
    found = []
    for file in sorted((root / "rlprobe").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            memory = any("BytesIO" in ast.unparse(argument) for argument in node.args)
            named = any(
                word.arg == "glob" and ast.unparse(word.value) == "False" for word in node.keywords
            )
            if node.func.attr in readers and not named and not memory:
                found.append(f"{file.relative_to(root)}:{node.lineno}")
    assert found == []


#: Rooms of the package, from the ground up: a room may import from lower floors only.
_FLOORS = (
    {"errors", "roles", "causes", "version"},
    {
        "stages",
        "sketch",
        "sketch_floors",
        "formats",
        "disk",
        "terminal",
        "redaction",
        "imports",
        "compiled",
        "said",
    },
    {"files", "documents", "coordinates", "logical"},
    {"config", "rollouts", "capture", "faults", "claims"},
    {"dumps"},
    {"store"},
    {"spec"},
    {"frameworks", "compare"},
    {"runs", "judge"},
    {"diagnose"},
    {"refine", "report"},
    {"doctor", "selftest"},
    {"cli", "autoload"},
)


def _modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for file in sorted((root / "rlprobe").rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def _imports(file: Path, modules: Collection[str]) -> set[str]:
    """Modules of the package that a file imports: anywhere in it, and for its types as well."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import hides where it leads"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else name.rpartition(".")[0] for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules}


def test_dependencies_point_one_way(root: Path) -> None:
    floor = {room: number for number, rooms in enumerate(_FLOORS) for room in rooms}
    modules = _modules(root)
    rooms = {name.split(".")[1] for name in modules if "." in name} - {"__main__"}
    assert rooms == floor.keys()
    wrong = set()
    for name, file in modules.items():
        room = name.split(".")[1] if "." in name else None
        for other in _imports(file, modules):
            below = other.split(".")[1] if "." in other else None
            if room in floor and below in floor and below != room and floor[below] >= floor[room]:
                wrong.add((name, other))
    assert wrong == set()


def test_the_house_is_shown_as_it_is(root: Path) -> None:
    """A row a floor in docs/architecture.md, in their order."""
    text = (root / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.partition("## The house")[2].partition("\n## ")[0]
    shown = [
        set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\| (`[^|]+) \|", section, re.M)
    ]
    assert shown == [set(rooms) for rooms in _FLOORS]


def test_no_module_imports_itself_in_a_circle(root: Path) -> None:
    """Also not through an import inside a function, or one for types alone."""
    modules = _modules(root)
    order = TopologicalSorter(
        {name: _imports(file, modules) - {name} for name, file in modules.items()}
    )
    order.prepare()  # raises CycleError, which names the circle


#: A function that returns from more points than these is several: a table, or functions of its own.
_MOST_RETURNS = 9


def _returns(function: ast.AST) -> int:
    """Return statements of a function, without those of functions inside it."""
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    own = [node for node in ast.iter_child_nodes(function) if not isinstance(node, inside)]
    return sum(isinstance(node, ast.Return) + _returns(node) for node in own)


def test_no_function_is_a_ladder_of_returns(root: Path) -> None:
    ladders = {
        f"{name}.{node.name}": count
        for name, file in _modules(root).items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (count := _returns(node)) > _MOST_RETURNS
    }
    assert ladders == {}


def test_engines_know_no_framework(root: Path) -> None:
    """Both frameworks use the hooks of inference engines, which use neither."""
    found = set()
    for file in (root / "rlprobe/frameworks/engines").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= {name for name in ("verl", "slime") if f"rlprobe.frameworks.{name}" in text}
        found |= {name for name in ("verl", "slime") if f"import {name}" in text}
    assert found == set()
