"""Names that a Python file defines, read without running it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from rlprobe.errors import ConfigError

#: What can define names that are nowhere written down.
_DYNAMIC = frozenset({"globals", "exec", "__getattr__"})
#: What a value is made of that is no function, whatever else is in the file.
_LITERAL = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp)


class Names(NamedTuple):
    """Names bound at the top level of a file, conditions and loops included."""

    bound: frozenset[str]
    #: Of these, what is nothing but a number, a text or a collection of such: it cannot be called.
    literals: frozenset[str]
    #: Of these, functions and classes as they are written: no decorator, and no statement of the
    #: top level has them in hand, so that nothing has marked them.
    plain: frozenset[str]
    #: Of these, functions and classes under a decorator.
    decorated: frozenset[str]


def names(path: Path) -> Names | None:
    """Names bound at the top level of a file, and what is known of them.

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
    others = found.others | found.decorated
    bound = found.literals | found.plain | others
    if "*" in bound or (used | bound) & _DYNAMIC:
        return None
    return Names(
        frozenset(bound),
        frozenset(found.literals - found.plain - others),
        frozenset(found.plain - found.literals - others - found.mentioned),
        frozenset(found.decorated),
    )


class _Names(ast.NodeVisitor):
    """What statements bind where they stand; bodies of functions and classes are their own."""

    def __init__(self) -> None:
        self.literals: set[str] = set()
        self.plain: set[str] = set()
        self.decorated: set[str] = set()
        self.others: set[str] = set()
        self.mentioned: set[str] = set()

    def _defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        (self.decorated if node.decorator_list else self.plain).add(node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._defined(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._defined(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._defined(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.others.add(node.asname or node.name.partition(".")[0])

    def visit_Assign(self, node: ast.Assign) -> None:
        if _is_literal(node.value) and all(isinstance(each, ast.Name) for each in node.targets):
            self.literals.update(each.id for each in node.targets if isinstance(each, ast.Name))
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        (self.others if isinstance(node.ctx, ast.Store) else self.mentioned).add(node.id)


def _is_literal(value: ast.expr) -> bool:
    inner = (node for node in ast.walk(value) if isinstance(node, ast.expr))
    return all(isinstance(node, _LITERAL) for node in inner)
