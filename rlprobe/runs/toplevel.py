"""Names that a Python file defines, read without running it."""

from __future__ import annotations

import ast
from pathlib import Path

from rlprobe.errors import ConfigError

#: What can define names that are nowhere written down.
_DYNAMIC = frozenset({"globals", "exec", "__getattr__"})


def names(path: Path) -> frozenset[str] | None:
    """Names bound at the top level of a file, conditions and loops included.

    Returns:
        None where only running the file would tell: it imports ``*`` or makes names as it runs.

    Raises:
        ConfigError: it is no Python file; says the line.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{path} is no Python file: line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no Python file: {error}") from error
    found = _Names()
    found.visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if "*" in found.bound or (used | found.bound) & _DYNAMIC:
        return None
    return frozenset(found.bound)


class _Names(ast.NodeVisitor):
    """What statements bind where they stand; bodies of functions and classes are their own."""

    def __init__(self) -> None:
        self.bound: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.bound.add(node.name)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.bound.add(node.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.bound.add(node.name)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add(node.asname or node.name.partition(".")[0])

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
