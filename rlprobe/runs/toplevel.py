"""Names that a Python file defines, read without running it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import NamedTuple

from rlprobe.errors import ConfigError

#: What can define names that are nowhere written down.
_DYNAMIC = frozenset({"globals", "exec", "__getattr__"})
#: Modules of Python's own through which a file can reach any other.
_REACHING = frozenset({"importlib", "runpy", "pkgutil", "sys", "builtins", "pickle", "code"})
_REACHING_NAMES = frozenset({"__import__", "eval"})
#: What rlprobe has for declaring, which is declared nothing itself.
_DECLARING = frozenset({"fault", "benign", "Site"})
#: Decorators that need no import.
_BUILTIN_DECORATORS = frozenset({"staticmethod", "classmethod", "property"})
#: What a value is made of that is no function, whatever else is in the file.
_LITERAL = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp)


class Names(NamedTuple):
    """Names bound at the top level of a file, conditions and loops included."""

    bound: frozenset[str]
    #: Of these, what is nothing but a number, a text or a collection of such: it cannot be called.
    literals: frozenset[str]
    #: Of these, what nothing can have marked: functions and classes that no statement of the top
    #: level has in hand and that have no decorator, or one of Python's own library; what comes from
    #: that library; and everything of a file that imports nothing else.
    plain: frozenset[str]
    #: Of these, functions and classes under a decorator that may mark them.
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
    imported = _Imports(tree)
    found = _Names(imported)
    found.visit(tree)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    others = found.others | found.decorated
    bound = found.literals | found.plain | found.library | others
    if "*" in bound or (used | bound) & _DYNAMIC:
        return None
    literals = found.literals - found.plain - found.library - others
    plain = (found.plain | found.library) - found.mentioned
    for name, decorators in found.decorators.items():
        if imported.mark_nothing(decorators, others | found.plain | found.literals):
            found.decorated.discard(name)
            if name not in found.mentioned:
                plain.add(name)
    unmarked = plain - found.literals - found.others - found.decorated
    if imported.library_alone and not used & _REACHING_NAMES:
        unmarked, found.decorated = bound - literals, set()
    return Names(
        frozenset(bound), frozenset(literals), frozenset(unmarked), frozenset(found.decorated)
    )


class _Imports:
    """What a file takes from elsewhere, inside functions too."""

    def __init__(self, tree: ast.AST) -> None:
        #: Names that stand for something of Python's own library, wherever they are bound.
        self.of_library: set[str] = set()
        #: These, and what declares without being declared.
        self.unmarked: set[str] = set()
        #: Whether nothing comes from anywhere else.
        self.library_alone = True
        elsewhere: set[str] = set()
        declaring: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    own = self._is_own(alias.name)
                    name = alias.asname or alias.name.partition(".")[0]
                    (self.of_library if own else elsewhere).add(name)
            elif isinstance(node, ast.ImportFrom):
                own = not node.level and self._is_own(node.module or "")
                names = {alias.asname or alias.name for alias in node.names}
                if (node.module or "").partition(".")[0] == "rlprobe" and not node.level:
                    declaring |= names & _DECLARING
                (self.of_library if own else elsewhere).update(names)
        self.library_alone = not elsewhere
        self.of_library -= elsewhere
        self.unmarked = self.of_library | declaring

    @staticmethod
    def _is_own(module: str) -> bool:
        root = module.partition(".")[0]
        return root in sys.stdlib_module_names and root not in _REACHING

    def mark_nothing(self, decorators: list[ast.expr], bound: set[str]) -> bool:
        """Whether these are Python's own and are given nothing that could have been marked."""
        own = (self.of_library | _BUILTIN_DECORATORS) - bound
        each = (node for decorator in decorators for node in ast.walk(decorator))
        return all(node.id in own for node in each if isinstance(node, ast.Name))


class _Names(ast.NodeVisitor):
    """What statements bind where they stand; bodies of functions and classes are their own."""

    def __init__(self, imported: _Imports) -> None:
        self._imported = imported
        self.literals: set[str] = set()
        self.plain: set[str] = set()
        self.library: set[str] = set()
        self.decorated: set[str] = set()
        self.decorators: dict[str, list[ast.expr]] = {}
        self.others: set[str] = set()
        self.mentioned: set[str] = set()

    def _defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        (self.decorated if node.decorator_list else self.plain).add(node.name)
        self.decorators.setdefault(node.name, []).extend(node.decorator_list)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._defined(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._defined(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._defined(node)

    def visit_alias(self, node: ast.alias) -> None:
        name = node.asname or node.name.partition(".")[0]
        (self.library if name in self._imported.unmarked else self.others).add(name)

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
