"""How many rules name causes, and how many numbers are in them: ``python -m benchmarks.rules``.

Counted in the source, as it is or as it was (``--revision R``), of what decides a cause:

- a rule: a place in the code that names a class of ``rlprobe/causes.py`` (a literal equal to
  one; docstrings, tables of words and ``unknown`` do not count);
- a constant: a number in the code of those modules, other than 0, 1, -1 and 2, which are counting,
  and other than subscripts. A name's definition counts once however often it is used.

The counts compare revisions of this code with one another and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rlprobe.causes import CAUSES

#: Where causes are decided: statistics before refining, and operators after it.
ROOMS = ("rlprobe/diagnose/cause", "rlprobe/refine")
#: What writes, plans and runs a refinement decides nothing.
LEFT_OUT = ("reproduce.py", "suspects.py", "answers.py", "blocks.py", "trace.py", "substitution.py",
        "region.py", "refine.py")  # fmt: skip
_COUNTING = (0, 1, -1, 2)


def counted(source: str) -> tuple[int, int]:
    """Rules and constants of one module."""
    tree = ast.parse(source)
    skipped = {id(node) for node in _passed_over(tree)}
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in skipped]
    rules = [n for n in found if n.value in CAUSES and n.value != "unknown"]
    constants = [
        n
        for n in found
        if isinstance(n.value, (int, float))
        and not isinstance(n.value, bool)
        and n.value not in _COUNTING
    ]
    return len(rules), len(constants)


def _passed_over(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        if isinstance(node, ast.Subscript):
            yield from ast.walk(node.slice)


def files(revision: str | None) -> Iterator[tuple[str, str]]:
    """Names and texts of the modules that decide causes."""
    if revision is None:
        for room in ROOMS:
            for path in sorted(Path(room).rglob("*.py")):
                yield str(path), path.read_text(encoding="utf-8")
        return
    listed = _git("ls-tree", "-r", "--name-only", revision, *ROOMS).splitlines()
    for name in listed:
        if name.endswith(".py"):
            yield name, _git("show", f"{revision}:{name}")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], check=True, capture_output=True, text=True
    ).stdout  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--revision", help="a commit (default: the files as they are)")
    revision = parser.parse_args().revision
    totals: dict[str, list[int]] = {}
    for name, text in files(revision):
        if Path(name).name in LEFT_OUT:
            continue
        room = next(room for room in ROOMS if name.startswith(room))
        rules, constants = counted(text)
        total = totals.setdefault(room, [0, 0, 0])
        for index, number in enumerate((1, rules, constants)):
            total[index] += number
    for room, (modules, rules, constants) in totals.items():
        print(f"{room}: {modules} modules, {rules} rules, {constants} constants")


if __name__ == "__main__":
    main()
