"""What may a user import, and what does importing cost a training process that needs none of it?"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlprobe


@pytest.mark.parametrize("name", rlprobe.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(rlprobe, name) is not None
    assert name in dir(rlprobe)


def test_what_types_say_is_what_is_handed_out(root: Path) -> None:
    """The imports for types alone, and the table that is really used, name the same things."""
    tree = ast.parse((root / "rlprobe/__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    handed_out = {name: (f"rlprobe.{m}", there) for name, (m, there) in rlprobe._FROM.items()}
    assert typed == handed_out
    assert {*handed_out, "__version__"} == set(rlprobe.__all__)


def test_importing_the_package_loads_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import rlprobe; "
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "rlprobe" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"rlprobe"}


def test_a_name_that_is_not_there_is_said_as_python_does() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rlprobe.nothing  # noqa: B018


def test_its_types_are_told_to_type_checkers(root: Path) -> None:
    assert (root / "rlprobe/py.typed").read_bytes() == b""
