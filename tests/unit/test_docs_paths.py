"""Do the pages name files, rooms and workflows that are there?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from tests.unit.test_cli_docs import pages

#: Directories of the repository that a page may name a file of.
_ROOMS = "rlprobe|tests|workflow|profiles|containers|benchmarks|docs|config|requirements"
#: Made by running, or written with a placeholder.
_MADE = re.compile(r"[{}<>*…]|NAME|^config/(my|site)|^docs/\.")


#: A test or a page, in a docstring or a comment.
_SAID = re.compile(r"(?<![\w/.])(tests/(?:\w+/)*test_\w+\.py|docs/\w[\w.-]*\.md)")


def _named(text: str) -> set[str]:
    """Paths in backquotes that begin in a directory of the repository."""
    found = re.findall(rf"`((?:{_ROOMS})/[^`\s:]*)(?::[^`\s]*)?`", text)
    return {path for path in found if not _MADE.search(path)}


def test_files_that_pages_name_are_there(root: Path) -> None:
    named = {(p.name, path) for p in pages(root) for path in _named(p.read_text("utf-8"))}
    assert len(named) > 40
    missing = {(page, path) for page, path in named if not (root / path).exists()}
    assert missing == set()


def test_modules_are_named_from_the_root(root: Path) -> None:
    """``capture/sketches.py`` sends the reader searching, and nobody notices when it moves."""
    short = set()
    for page in pages(root):
        for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page.read_text(encoding="utf-8")):
            if not re.match(rf"(?:{_ROOMS})/", path):
                short.add((page.name, path))
    assert short == set()


def test_files_that_modules_name_are_there(root: Path) -> None:
    """A docstring or comment that sends the reader to a test must not send him nowhere."""
    missing = set()
    for file in [*(root / "rlprobe").rglob("*.py"), *(root / "tests").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        for path in _SAID.findall(text):
            if not (root / path).exists():
                missing.add((str(file.relative_to(root)), path))
    assert missing == set()


def _makefile(root: Path) -> str:
    parts = [root / "Makefile", *sorted(root.glob("*.mk"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in parts)


@pytest.mark.parametrize("name", ["tests.yml"])
def test_workflows_call_what_is_there(root: Path, name: str) -> None:
    text = (root / ".github/workflows" / name).read_text(encoding="utf-8")
    assert set(yaml.safe_load(text)["jobs"]) == {
        "lint", "fast", "oldest-python", "full", "slime-image", "contract", "wheel"
    }  # fmt: skip
    targets = set(re.findall(r"run: make ([\w-]+)", text))
    assert targets == {"lint", "test-fast", "test", "cluster", "contract-core"}
    for target in targets:
        assert re.search(rf"^{target}:", _makefile(root), re.MULTILINE)
    for pattern in re.findall(r"\btests/unit/[\w*./]+", text):
        assert list(root.glob(pattern)), pattern


def test_every_target_of_make_is_listed_for_who_opens_it(root: Path) -> None:
    text = _makefile(root)
    phony = set(" ".join(re.findall(r"^\.PHONY: (.*)", text, re.MULTILINE)).split())
    told = set(re.findall(r"^# make ([\w-]+)", text, re.MULTILINE))
    assert phony - told == {"install"}, "made by every other target"


def test_every_marker_is_said_where_contributors_look(root: Path) -> None:
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    used = set()
    for file in (root / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pytest.mark."):
                used.add(node.attr)
    assert {"slow", "long"} <= used
    for marker in ("slow", "long", "contract"):
        assert f"`{marker}`" in text
